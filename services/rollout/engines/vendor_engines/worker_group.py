"""The workers of an engine as one receiver of weights: either all have a version, or none.

Each worker is a rank of a transfer group, and receives and proves the share of the weights that its
model reads. The replica's digest covers the parts of all workers; a part that several workers have
counts once.

Consumes: answers of each worker, by rank. Produces: one outcome for the replica.
Waits for: the workers' threads, by polling.
Unblocked by: answers; a failure of one worker: then all leave the group.
On failure: the error names the worker, if there are several. If only some workers applied a
    version, the model is a mixture, which is an EngineError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from services.rollout.engines.protocol import StagedVersion
from sluice.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    SluiceError,
    WeightSyncError,
)
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weight_share import WeightShare
from sluice.weights.digest import combined_digest

Answer = dict[str, object]
_CALL_TIMEOUT_S = 60.0
_APPLY_TIMEOUT_S = 600.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.05
_NOTHING_STAGED = (-1, "")
_REFUSALS: Mapping[str, type[SluiceError]] = {
    "InvalidRequestError": InvalidRequestError,
    "NotReadyError": NotReadyError,
}


class WorkerBegin(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a worker.

    Attributes:
        device: kind of device that the vendor computes on; each worker has one of its own.
        backend: collectives that bring weights; ``None`` is the device's own.
        tensors: the weights, as they arrive.
        model_path: directory with a Hugging Face configuration.
        trust_remote_code: run model code that ships with it.
    """

    device: str
    backend: str | None
    tensors: tuple[TensorSpec, ...]
    model_path: str
    trust_remote_code: bool


class WorkerCalls(Protocol):
    """A call of a method of `weight_worker.WeightWorker` in every worker."""

    async def call_workers(
        self, method: str, *arguments: object, timeout_s: float
    ) -> Sequence[object]:
        """Return the results, by rank."""
        ...


class WorkerGroup:
    """All workers of one engine; see the module.

    Args:
        vendor: the engine's name, for errors.

    Attributes:
        staged: the version that all workers hold, and its digest.
    """

    def __init__(self, calls: WorkerCalls, vendor: str) -> None:
        self._calls = calls
        self._vendor = vendor
        self.staged = _NOTHING_STAGED
        self._num_begun = 0  # joins and stages

    async def begin(self, reported: WorkerBegin) -> tuple[WeightShare, ...]:
        """Prepare every worker; return the share of each.

        Raises:
            ConfigError: this version of the engine lacks what a worker needs, or there is no such
                model.
        """
        answers = await self._call("sluice_begin", msgspec.json.encode(reported))
        for failure in _errors(answers):
            raise ConfigError(str(failure["error"]))
        begin_answers = [msgspec.convert(answer, Answer) for answer in answers]
        return tuple(msgspec.convert(answer["share"], WeightShare) for answer in begin_answers)

    async def check_alive(self, timeout_s: float) -> int:
        """Return how many samples the workers hold; answered in the engine's loop."""
        answers = await self._call("sluice_check_alive", timeout_s=timeout_s)
        return max(msgspec.convert(answers, list[int]))

    async def processes(self) -> tuple[int, ...]:
        """Return the ids of the workers' processes."""
        return tuple(msgspec.convert(await self._call("sluice_process"), list[int]))

    async def join(self, spec: TransferGroupSpec) -> str:
        """Join an epoch; return the plan's digest."""
        phase = f"joining epoch {spec.epoch}"
        outcomes = await self._outcomes(phase, "sluice_join", msgspec.msgpack.encode(spec))
        return str(outcomes[0]["plan_digest"])

    async def stage(self, version: int) -> StagedVersion:
        """Receive a version into staging memory of every worker.

        Returns:
            The digest of all parts, the most bytes that a worker received, and the seconds of the
            slowest.

        Raises:
            WeightSyncError: a worker failed, or differs from another in a part that both have;
                names the worker.
        """
        phase, self.staged = f"staging version {version}", _NOTHING_STAGED
        outcomes = await self._outcomes(phase, "sluice_stage", version)
        staged = [msgspec.convert(staged_part, StagedVersion) for staged_part in outcomes]
        try:
            parts = _merge_digests(staged)
        except ValueError as error:
            await self.abort(str(error))
            raise WeightSyncError("trainer", phase, str(error)) from error
        digest = combined_digest(
            {name: bytes.fromhex(staged_part) for name, staged_part in parts.items()}
        )
        self.staged = (version, digest)
        max_bytes = max(staged_part.received_bytes for staged_part in staged)
        return StagedVersion(
            version, digest, max_bytes, max(staged_part.seconds for staged_part in staged), parts
        )

    async def _outcomes(self, phase: str, method: str, *arguments: object) -> list[Answer]:
        """Begin a join or a stage and wait for the workers' threads; after a failure of one, all
        leave the group.

        A later join or stage ends this call; what workers report then is the later one's.
        """
        self._num_begun = number = self._num_begun + 1
        pause_s, answers_by_rank = _FIRST_POLL_S, dict[int, Answer]()
        try:
            _check(await self._call(method, *arguments), phase)
            while self._num_begun == number:
                answers = await self._call("sluice_outcome")
                answers_by_rank |= _check(answers, phase)  # each worker reports its result once
                if self._num_begun == number and len(answers_by_rank) == len(answers):
                    return [answers_by_rank[rank] for rank in range(len(answers))]
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        except asyncio.CancelledError:
            if self._num_begun == number:
                with suppress(EngineError):
                    await self.abort(f"the call was cancelled while {phase}")
            raise
        except EngineError:  # a worker that does not answer cannot leave on request
            raise
        except SluiceError as error:
            if self._num_begun == number:
                await self.abort(f"one of the workers failed: {error}")
            raise
        raise WeightSyncError("trainer", phase, "another call began meanwhile")

    async def check_staged(self, version: int, digest: str) -> None:
        """Make sure that every worker can apply a version.

        Raises:
            WeightSyncError: something else is staged, or nothing.
        """
        phase, (held_version, held_digest) = f"committing version {version}", self.staged
        _check(await self._call("sluice_check_staged", version), phase)
        if (held_version, held_digest) != (version, digest):
            raise WeightSyncError(
                "trainer",
                phase,
                f"the digest of what is staged here is {held_digest}, not {digest}",
            )

    async def apply(self, version: int) -> None:
        """Make the model compute with the staged weights; call it only while nothing is sampled.

        Raises:
            WeightSyncError: no worker has this version staged; the old weights stay.
            EngineError: the model could not take them and is broken.
        """
        answers = await self._call("sluice_apply", version, timeout_s=_APPLY_TIMEOUT_S)
        failures = _errors(answers)
        # A worker that took the weights cannot give them back.
        if any("broken" in failure for failure in failures) or 0 < len(failures) < len(answers):
            raise EngineError(
                f"{self._vendor}: loading version {version} failed half-way "
                f"({failures[0]['error']}); restart the replica"
            )
        _check(answers, f"committing version {version}")

    async def abort(self, reason: str) -> None:
        """Discard the staged weights and leave the group."""
        await self._call("sluice_abort", reason)

    async def close(self) -> None:
        """Leave the group permanently."""
        await self._call("sluice_close")

    async def _call(
        self, method: str, *arguments: object, timeout_s: float = _CALL_TIMEOUT_S
    ) -> list[object]:
        return list(await self._calls.call_workers(method, *arguments, timeout_s=timeout_s))


def _merge_digests(staged: Sequence[StagedVersion]) -> dict[str, str]:
    """Return the digests of the parts of all workers.

    Raises:
        ValueError: two workers differ in a part; names it and the second of them.
    """
    parts: dict[str, str] = {}
    for rank, staged_version in enumerate(staged):
        for name, digest in staged_version.parts.items():
            if parts.setdefault(name, digest) != digest:
                raise ValueError(
                    f"worker {rank} of {len(staged)}: the digest of its {name} is {digest}, that "
                    f"of an earlier worker's {parts[name]}"
                )
    return parts


def _errors(answers: Sequence[object]) -> list[Answer]:
    """Return the answers that are errors; each names its worker."""
    failures = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, dict) and "error" in answer:
            prefix = f"worker {rank} of {len(answers)}: " if len(answers) > 1 else ""
            failures.append({**answer, "error": f"{prefix}{answer['error']}"})
    return failures


def _check(answers: Sequence[object], phase: str) -> dict[int, Answer]:
    """Return the answers that workers gave, by rank, if none of them is an error."""
    for failure in _errors(answers):
        message = str(failure["error"])
        refusal = _REFUSALS.get(str(failure.get("kind")))
        if refusal is not None:
            raise refusal(message)
        raise WeightSyncError("trainer", phase, message)
    return {
        rank: msgspec.convert(answer, Answer)
        for rank, answer in enumerate(answers)
        if answer is not None
    }
