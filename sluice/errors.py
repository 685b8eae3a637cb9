"""The one exception tree. Domain code raises these; `sluice.rpc.status` maps them to gRPC.

Every message names the thing, its value and the remedy; `DeadlineError` and `PeerError` name the
peer and the phase.
"""

from __future__ import annotations


class SluiceError(Exception):
    """Base of all errors sluice raises on purpose."""


class ConfigError(SluiceError):
    """The run configuration is wrong. Names the key path, the value and the remedy."""


class MissingPackageError(ConfigError):
    """The configuration needs a package that is not installed, or whose libraries are not there;
    a restart cannot change that."""


class DataError(SluiceError):
    """A data file or row is wrong. Names the file, the row or column, and the remedy."""


class InvalidRequestError(SluiceError):
    """A request breaks the contract of the call; repeating it cannot succeed."""


class PromptTooLongError(InvalidRequestError):
    """A prompt has more tokens than data.max_prompt_length and is not to be cut."""

    @classmethod
    def of(cls, num_tokens: int, limit: int) -> PromptTooLongError:
        """Return the error with its numbers and remedies."""
        return cls(
            f"prompt: {num_tokens} tokens exceed data.max_prompt_length={limit}; shorten it, raise "
            "the limit, set data.truncation to left, right or middle, or leave such prompts out "
            "with data.filter_overlong_prompts=true"
        )


class SequenceTooLongError(SluiceError):
    """A conversation has as many tokens as it may have, and leaves none to sample."""


class HistoryRewrittenError(SluiceError):
    """The chat template writes earlier turns differently, so exact tokens cannot be continued."""


class LeaseEndedError(SluiceError):
    """A leased sample has ended, and takes no other end and no further request."""


class AccessDeniedError(SluiceError):
    """A peer does not accept this process's token, or not for this call."""


class NotFoundError(SluiceError):
    """The named batch, replica or prompt is unknown to this process."""


class NotReadyError(SluiceError):
    """The service exists but cannot serve this call in its present state."""


class ExhaustedError(SluiceError):
    """A bound on memory, queue length or outstanding requests was reached."""


class BatchUnfillableError(SluiceError):
    """No train batch can be formed any more (data exhausted, or almost no group is mixed)."""


class DataExhaustedError(BatchUnfillableError):
    """The data set has ended before the next train batch was full; a run by epochs then ends."""


class ValidationFailedError(SluiceError):
    """A validation gave no result: too many samples failed, or the policy changed meanwhile."""


class DeadlineError(SluiceError):
    """A wait reached its deadline."""

    def __init__(self, peer: str, phase: str, seconds: float, remedy: str = "") -> None:
        self.peer, self.phase, self.seconds = peer, phase, seconds
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"{peer}: no answer within {seconds:g} s while {phase}{tail}")


class PeerError(SluiceError):
    """Another process failed or vanished during a call."""

    def __init__(self, peer: str, phase: str, detail: str) -> None:
        self.peer, self.phase, self.detail = peer, phase, detail
        super().__init__(f"{peer}: failed while {phase}: {detail}")


class PeerDefectError(PeerError):
    """Another process answered that it is broken (INTERNAL); asking again seldom helps."""


class HandshakeError(PeerError):
    """No connection came about that both sides accept: TLS settings or certificates do not fit."""


class WeightSyncError(SluiceError):
    """A weight update could not be proven complete on a peer. Names peer, phase and item."""

    def __init__(self, peer: str, phase: str, detail: str) -> None:
        self.peer, self.phase, self.detail = peer, phase, detail
        super().__init__(f"weight sync with {peer} failed in phase {phase}: {detail}")


class EngineError(SluiceError):
    """The inference engine failed while generating."""


class EnvironmentUnavailable(SluiceError):
    """What an environment needs does not answer; the sample is left out and never counts as wrong.

    Environments raise it, as `sluice.EnvironmentUnavailable`.
    """


class EnvironmentDefectError(SluiceError):
    """An environment's own code failed. Names the method, the exception and its place."""


class SandboxUnavailableError(EnvironmentUnavailable):
    """The sandbox could not run a program: an infrastructure failure, never the program's fault."""


class CheckpointError(SluiceError):
    """A checkpoint is missing, incomplete or of another model."""


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Return all errors of a group and of the groups in it, in order."""
    errors: list[BaseException] = []
    for error in group.exceptions:
        errors += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return errors
