"""What every inference engine offers its rollout service.

Tokens in, tokens out. An engine generates groups (all requested samples of one prompt share the
prompt's prefill), tells for each token the logprob of the distribution it was drawn from and the
policy version that drew it, and takes new weights while it generates. All methods are called from
one event loop; none may block it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypedDict

from services.rollout.engines.text import Decode, StopStringWatch
from sluice.algorithm.accounting import ReplicaCounters
from sluice.types import (
    FinishReason,
    Logprobs,
    SamplingParams,
    TensorSpec,
    TokenIds,
    TransferGroupSpec,
)


@dataclass(frozen=True, slots=True, eq=False)
class PartialSample:
    """Tokens of a sample that were drawn before, to be continued."""

    sample_index: int
    token_ids: TokenIds  # [tokens]


@dataclass(slots=True, eq=False)
class CallTokens:
    """Tokens of one call on their way out; used from the event loop only.

    Attributes:
        yielded: by the engine, to whoever sends them on.
        sent: to the caller.
    """

    yielded: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """Samples to draw for one prompt.

    Randomness of sample *i*, token *t* depends on (`sampling.seed`, i, t) only.
    `sampling.max_tokens` counts a partial's tokens too. `tokens` counts those on their way out.
    Samples of higher `priority` get free slots first, where the engine has a say in that.
    `decode` is needed for `sampling.stop` only. `images` are encoded files, in the order of their
    (already expanded) placeholder tokens in the prompt. `for_direct_client`: the caller is no
    service of the run, so its tokens are entered apart.
    """

    request_id: str
    prompt_token_ids: TokenIds  # [prompt tokens]
    sample_indexes: tuple[int, ...]
    sampling: SamplingParams
    partials: tuple[PartialSample, ...] = ()
    tokens: CallTokens = field(default_factory=CallTokens)
    priority: int = 0
    decode: Decode | None = None
    images: tuple[bytes, ...] = ()
    for_direct_client: bool = False

    def watch(self) -> StopStringWatch | None:
        """For one of its samples, if strings end them."""
        if not self.sampling.stop or self.decode is None:
            return None
        return StopStringWatch(self.sampling.stop, self.decode)


@dataclass(frozen=True, slots=True, eq=False)
class SampleChunk:
    """New tokens of one sample, all drawn by one version.

    `finish_reason` is set on a sample's last chunk (which may hold no tokens).
    """

    sample_index: int
    token_ids: TokenIds  # [new tokens]
    behavior_logprobs: Logprobs  # [new tokens]
    version: int
    finish_reason: FinishReason | None


def num_tokens(chunks: Iterable[SampleChunk]) -> int:
    """Tokens in all of the chunks."""
    return sum(int(chunk.token_ids.size) for chunk in chunks)


@dataclass(slots=True, eq=False)
class SentTokens:
    """What became of tokens that were drawn for callers of one kind.

    Attributes:
        sent: to callers.
        unsent: of calls that ended before.
    """

    sent: int = 0
    unsent: int = 0


@dataclass(slots=True, eq=False)
class UnsentTokens:
    """What became of the tokens that calls got out of an engine, or left in it.

    Used from the event loop only. Who sends tokens to callers enters what was sent, and what a
    call that ended left unsent; `Engine.generate` enters the tokens that it did not yield.

    Attributes:
        services: tokens for services of the run.
        direct: tokens for all other callers.
    """

    services: SentTokens = field(default_factory=SentTokens)
    direct: SentTokens = field(default_factory=SentTokens)

    def of(self, request: GenerationRequest) -> SentTokens:
        """Return where tokens of a request are entered."""
        return self.direct if request.for_direct_client else self.services

    def plus(self, other: UnsentTokens) -> UnsentTokens:
        """Return the sums of both."""
        return UnsentTokens(
            services=SentTokens(
                self.services.sent + other.services.sent,
                self.services.unsent + other.services.unsent,
            ),
            direct=SentTokens(
                self.direct.sent + other.direct.sent, self.direct.unsent + other.direct.unsent
            ),
        )

    def token_counters(self, generated: int) -> TokenCounters:
        """Return the token counters of an engine that has sampled `generated` tokens."""
        unsent = self.services.unsent + self.direct.unsent
        return TokenCounters(
            generated_tokens=generated,
            unsent_tokens=unsent,
            running_tokens=generated - unsent - self.services.sent - self.direct.sent,
            direct_sent_tokens=self.direct.sent,
            direct_unsent_tokens=self.direct.unsent,
        )


class TokenCounters(TypedDict):
    """The part of `ReplicaCounters` that counts tokens."""

    generated_tokens: int
    unsent_tokens: int
    running_tokens: int
    direct_sent_tokens: int
    direct_unsent_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad(ReplicaCounters):
    """The engine's counters and what it serves, at one moment.

    Attributes:
        slots: sequences that can run at once.
        version: the policy version that serves; ``None`` before the first weights.
        weight_digest: its digest; empty before the first weights.
        slots_may_wait: a sample with a slot may still wait for others, for space in the KV cache.
    """

    slots: int
    version: int | None
    weight_digest: str
    slots_may_wait: bool = False


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that is complete in staging memory."""

    version: int
    digest: str
    received_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CommitResult:
    """A version that serves now; `stall_s` is how long no token was drawn."""

    version: int
    digest: str
    stall_s: float


class PauseMode(StrEnum):
    """What becomes of samples that hold a slot when the engine pauses.

    KEEP: they go on where they were. RECOMPUTE: they do, with caches that are computed anew, and
    no later sample uses an earlier prompt's cache. ABORT: they end as aborted with what they have,
    those that wait for a slot too. DRAIN: they are drawn to their end first; those that wait for a
    slot go on waiting, also where others of their group have one.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    ABORT = "abort"
    DRAIN = "drain"


class Engine(Protocol):
    """One replica's engine."""

    @property
    def accounting(self) -> UnsentTokens:
        """Where whoever sends the tokens on enters what became of them."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt plus response tokens a sample may have."""
        ...

    @property
    def weight_layout(self) -> Sequence[TensorSpec]:
        """The weights the engine expects, in the order of the wire."""
        ...

    async def start(self) -> None:
        """Builds the model without weights. Raises ConfigError for a path that holds no model."""
        ...

    async def stop(self) -> None:
        """Aborts what runs and frees everything. Repeating it is harmless."""
        ...

    async def probe(self) -> EngineLoad:
        """Answers from inside the engine's loop, so that a hung engine does not answer."""
        ...

    def load(self) -> EngineLoad:
        """The latest snapshot, without waiting."""
        ...

    def generate(
        self,
        request: GenerationRequest,
        *,
        every_token: bool,
        partial_interval_s: float | None = None,
    ) -> AsyncIterator[tuple[SampleChunk, ...]]:
        """Draws the samples; yields what has come since the last yield.

        With `every_token` false a sample's tokens come in few chunks, at the latest when it
        finishes; with `partial_interval_s` also those of unfinished samples about once in so many
        seconds. Closing the iterator, or cancelling its consumer, aborts the samples and frees
        their slots before the next decode step. What was yielded before has all that was drawn
        up to its last token, and can be continued (`GenerationRequest.partials`); what was not is
        lost, and entered as unsent.

        Raises:
            InvalidRequestError: prompt and response do not fit `max_model_len`, or the samples are
                more than the engine takes when it is idle.
            NotReadyError: no weights yet.
            ExhaustedError: too many samples are waiting.
            EngineError: the engine broke.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Draws no token from its return until `resume`; further samples wait for that.

        Everything else works meanwhile: probes, ending calls, and new weights, after whose commit
        the engine stays paused. Pausing again is harmless. If it is cancelled, call `resume`.
        """
        ...

    async def resume(self) -> None:
        """Draws on. Harmless without a pause."""
        ...

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Joins one epoch's transfer group, leaving any earlier one; returns the plan's digest."""
        ...

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receives one version into staging memory while generation goes on."""
        ...

    async def commit(self, epoch: int, version: int, digest: str) -> CommitResult:
        """Swaps the staged version in between two decode steps. Idempotent.

        Raises:
            WeightSyncError: nothing staged under that version, or another digest.
        """
        ...

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Throws away what is staged and leaves the group. Idempotent."""
        ...
