"""The workers of one engine as one receiver of weights: all of them have a version, or none.

Each worker is a rank of the transfer group, and receives and proves every weight whole; the
vendor's loader cuts out the worker's share when the model takes it.

Consumes: answers of each worker, by rank. Produces: one outcome for the replica.
Waits for: the workers' threads, by polling.
Unblocked by: answers; a failure of one worker: then all leave the group.
On failure: the error names the worker, if there are several. If only some workers applied a
    version, the model is a mixture, which is an EngineError.
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
    """The first message to a worker.

    Attributes:
        device: kind of device that the vendor computes on; each worker has one of its own.
        backend: collectives that bring weights; ``None`` is the device's own.
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
    """A call of a method of `weight_worker.WeightWorker` in every worker."""

    async def call_workers(
        self, method: str, *arguments: object, timeout_s: float
    ) -> Sequence[object]:
        """Return the results, by rank."""
        ...


class WeightWorkers:
    """All workers of one engine; see the module.

    Args:
        vendor: the engine's name, for errors.
    """

    def __init__(self, calls: WorkerCalls, vendor: str) -> None:
        self._calls = calls
        self._vendor = vendor

    async def begin(self, reported: WorkerBegin) -> None:
        """Prepare every worker.

        Raises:
            ConfigError: this version of the engine lacks what a worker needs, or there is no such
                model.
        """
        for failure in _errors(await self._call("sluice_begin", msgspec.json.encode(reported))):
            raise ConfigError(str(failure["error"]))

    async def heartbeat(self, timeout_s: float) -> int:
        """Return how many samples the workers hold; answered in the engine's loop."""
        answers = await self._call("sluice_pulse", timeout_s=timeout_s)
        return max(msgspec.convert(answers, list[int]))

    async def processes(self) -> tuple[int, ...]:
        """Return the ids of the workers' processes."""
        return tuple(msgspec.convert(await self._call("sluice_process"), list[int]))

    async def join(self, spec: TransferGroupSpec) -> str:
        """Join an epoch; return the plan's digest."""
        phase = f"joining epoch {spec.epoch}"
        answers = await self._call("sluice_join", msgspec.msgpack.encode(spec))
        outcomes = await self._outcomes(answers, phase)
        return str(outcomes[0]["plan_digest"])

    async def stage(self, version: int) -> StagedVersion:
        """Receive a version into staging memory of every worker.

        Returns:
            The bytes that each worker received, and the seconds of the slowest.
        """
        phase = f"staging version {version}"
        outcomes = await self._outcomes(await self._call("sluice_stage", version), phase)
        staged = [msgspec.convert(one, StagedVersion) for one in outcomes]
        # Each worker proved its own copy; only together they prove that all copies are equal.
        digests = [one.digest for one in staged]
        if len(set(digests)) != 1:
            await self.abort("the workers' digests differ")
            found = ", ".join(f"{digest} in worker {rank}" for rank, digest in enumerate(digests))
            raise WeightSyncError("trainer", phase, f"the workers' digests differ: {found}")
        return max(staged, key=lambda one: one.seconds)

    async def _outcomes(self, begun: list[object], phase: str) -> list[Answer]:
        """Wait for the workers' threads; after a failure of one, all leave the group."""
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
        except EngineError:  # a worker that does not answer cannot leave on request
            raise
        except SluiceError as error:
            await self.abort(f"one of the workers failed: {error}")
            raise

    async def check_staged(self, version: int, digest: str) -> None:
        """Make sure that every worker can apply a version.

        Raises:
            WeightSyncError: something else is staged, or nothing.
        """
        answers = await self._call("sluice_check_staged", version, digest)
        _check(answers, f"committing version {version}")

    async def apply(self, version: int, digest: str) -> None:
        """Make the model compute with the staged weights; call it only while nothing is sampled.

        Raises:
            WeightSyncError: no worker has it; the old weights stay.
            EngineError: the model could not take them and is broken.
        """
        phase = f"committing version {version}"
        answers = await self._call("sluice_apply", version, digest, timeout_s=_APPLY_TIMEOUT_S)
        failures = _errors(answers)
        # A worker that took the weights cannot give them back.
        if any("broken" in one for one in failures) or 0 < len(failures) < len(answers):
            raise EngineError(
                f"{self._vendor}: loading version {version} failed half-way "
                f"({failures[0]['error']}); restart the replica"
            )
        _check(answers, phase)

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


def _errors(answers: Sequence[object]) -> list[Answer]:
    """Return the answers that are errors; each names its worker."""
    failures = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, dict) and "error" in answer:
            whose = f"worker {rank} of {len(answers)}: " if len(answers) > 1 else ""
            failures.append({**answer, "error": f"{whose}{answer['error']}"})
    return failures


def _check(answers: Sequence[object], phase: str) -> list[Answer]:
    """Return the workers' answers so far, if none of them is an error."""
    for failure in _errors(answers):
        message = str(failure["error"])
        refusal = _REFUSALS.get(str(failure.get("kind")))
        if refusal is not None:
            raise refusal(message)
        raise WeightSyncError("trainer", phase, message)
    return [msgspec.convert(answer, Answer) for answer in answers if answer is not None]
