"""The workers of one vLLM engine as one receiver of weights: all of them have a version, or none.

Each worker is a rank of the transfer group, and receives and proves every weight whole; vLLM's
loader cuts out the worker's share when the model takes it.

Consumes: answers of each worker, by rank. Produces: one outcome for the replica.
Waits for: the workers' threads, by asking again and again.
Unblocked by: answers; and a failure of one worker, after which all leave the group.
On failure: the error names the worker, where there are several. An apply that only some workers
    came through leaves a mixture of versions, which is an EngineError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
from sluice.types import TransferGroupSpec

Answer = dict[str, object]
_CALL_TIMEOUT_S = 60.0
_APPLY_TIMEOUT_S = 600.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.05
_REFUSALS: Mapping[str, type[SluiceError]] = {
    "InvalidRequestError": InvalidRequestError,
    "NotReadyError": NotReadyError,
}


class WorkerBegin(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told before anything else.

    Attributes:
        device: kind of what vLLM computes on; each worker has its own one of it.
        backend: collectives that weights arrive by; ``None`` is the device's own.
        shapes: of the weights, by the names they arrive under.
        model_path: directory with a Hugging Face configuration.
        trust_remote_code: run model code that ships with it.
    """

    device: str
    backend: str | None
    shapes: dict[str, tuple[int, ...]]
    model_path: str
    trust_remote_code: bool


class WorkerCalls(Protocol):
    """How a method of `vllm_worker.WeightWorker` is called in every worker."""

    async def call_workers(
        self, method: str, *arguments: object, timeout_s: float
    ) -> Sequence[object]:
        """What it returned, by rank."""
        ...


class VllmWorkers:
    """See the module."""

    def __init__(self, calls: WorkerCalls) -> None:
        self._calls = calls

    async def begin(self, reported: WorkerBegin) -> None:
        """Prepares every worker.

        Raises:
            ConfigError: this version of vLLM lacks what a worker needs, or there is no such model.
        """
        for failure in _errors(await self._call("sluice_begin", msgspec.json.encode(reported))):
            raise ConfigError(str(failure["error"]))

    async def heartbeat(self, timeout_s: float) -> int:
        """Samples that the workers hold since their last step, asked through the engine's loop."""
        answers = await self._call("sluice_pulse", timeout_s=timeout_s)
        return max(msgspec.convert(answers, list[int]))

    async def processes(self) -> tuple[int, ...]:
        """Ids of the workers' processes."""
        return tuple(msgspec.convert(await self._call("sluice_process"), list[int]))

    async def join(self, spec: TransferGroupSpec) -> str:
        """Joins an epoch; returns the plan's digest."""
        phase = f"joining epoch {spec.epoch}"
        answers = await self._call("sluice_join", msgspec.msgpack.encode(spec))
        outcomes = await self._outcomes(answers, phase)
        return str(outcomes[0]["plan_digest"])

    async def stage(self, version: int) -> StagedVersion:
        """Receives a version into staging memory of every worker.

        Returns:
            The bytes that each worker received, and the seconds of the slowest.
        """
        phase = f"staging version {version}"
        outcomes = await self._outcomes(await self._call("sluice_stage", version), phase)
        staged = [msgspec.convert(one, StagedVersion) for one in outcomes]
        digests = [one.digest for one in staged]
        if len(set(digests)) != 1:
            await self.abort("the workers' digests differ")
            found = ", ".join(f"{digest} in worker {rank}" for rank, digest in enumerate(digests))
            raise WeightSyncError("trainer", phase, f"the workers' digests differ: {found}")
        return max(staged, key=lambda one: one.seconds)

    async def _outcomes(self, begun: list[object], phase: str) -> list[Answer]:
        """What the workers' threads have come to; whoever fails has all leave the group."""
        pause_s = _FIRST_POLL_S
        try:
            _check(begun, phase)
            while True:
                answers = await self._call("sluice_outcome")
                known = _check(answers, phase)
                if len(known) == len(answers):
                    return known
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        except asyncio.CancelledError:
            await self.abort(f"the call was cancelled while {phase}")
            raise
        except EngineError:  # who does not answer cannot be told either
            raise
        except SluiceError as error:
            await self.abort(f"one of the workers failed: {error}")
            raise

    async def check_staged(self, version: int, digest: str) -> None:
        """Makes sure that every worker can apply a version.

        Raises:
            WeightSyncError: something else is staged, or nothing.
        """
        answers = await self._call("sluice_check_staged", version, digest)
        _check(answers, f"committing version {version}")

    async def apply(self, version: int, digest: str) -> None:
        """Has the model compute with what is staged; call it only while nothing is drawn.

        Raises:
            WeightSyncError: no worker has it; the old weights go on serving.
            EngineError: the model could not take them and is broken.
        """
        phase = f"committing version {version}"
        answers = await self._call("sluice_apply", version, digest, timeout_s=_APPLY_TIMEOUT_S)
        failures = _errors(answers)
        if any("broken" in one for one in failures) or 0 < len(failures) < len(answers):
            raise EngineError(
                f"vLLM: loading version {version} failed half-way ({failures[0]['error']}); "
                "restart the replica"
            )
        _check(answers, phase)

    async def abort(self, reason: str) -> None:
        """Throws away what is staged and leaves the group."""
        await self._call("sluice_abort", reason)

    async def close(self) -> None:
        """Leaves the group for good."""
        await self._call("sluice_close")

    async def _call(
        self, method: str, *arguments: object, timeout_s: float = _CALL_TIMEOUT_S
    ) -> list[object]:
        return list(await self._calls.call_workers(method, *arguments, timeout_s=timeout_s))


def _errors(answers: Sequence[object]) -> list[Answer]:
    """The answers that are errors, each with the worker it is of."""
    failures = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, dict) and "error" in answer:
            whose = f"worker {rank} of {len(answers)}: " if len(answers) > 1 else ""
            failures.append({**answer, "error": f"{whose}{answer['error']}"})
    return failures


def _check(answers: Sequence[object], phase: str) -> list[Answer]:
    """The workers' answers so far, if none of them is an error."""
    for failure in _errors(answers):
        message = str(failure["error"])
        refusal = _REFUSALS.get(str(failure.get("kind")))
        if refusal is not None:
            raise refusal(message)
        raise WeightSyncError("trainer", phase, message)
    return [msgspec.convert(answer, Answer) for answer in answers if answer is not None]
