"""What happens in vLLM's event loop: samples, probes, and weights.

Consumes: coroutines begun by the service's event loop. Produces: chunks, posted as they come.
Waits for: vLLM's processes, each call with a deadline.
On failure: of a sample, its request fails; of an apply, the model is a mixture of versions and the
engine is broken for good.
On shutdown: what runs is aborted and delivered, then vLLM's processes end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping

import msgspec

from services.rollout.engines.protocol import (
    GenerationRequest,
    PauseMode,
    SampleChunk,
    StagedVersion,
)
from services.rollout.engines.vllm_ascend import ascend_arguments, ascend_environment
from services.rollout.engines.vllm_features import VllmClient, set_environment
from services.rollout.engines.vllm_layout import CheckpointLayout, checkpoint_layout
from services.rollout.engines.vllm_request import ModelLimits, Pace, RequestRun
from services.rollout.engines.vllm_settings import VllmSettings
from services.rollout.engines.vllm_stream import ChunkStream
from sluice.device.select import select_device
from sluice.errors import (
    EngineError,
    InvalidRequestError,
    NotReadyError,
    SluiceError,
    WeightSyncError,
)
from sluice.types import TransferGroupSpec

__all__ = ["VllmCore"]

_log = logging.getLogger(__name__)
_CALL_TIMEOUT_S = 60.0
_APPLY_TIMEOUT_S = 600.0
_CLOSE_TIMEOUT_S = 20.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.05
_PAUSES: Mapping[PauseMode, str] = {
    PauseMode.KEEP: "keep",
    PauseMode.RECOMPUTE: "keep",
    PauseMode.ABORT: "abort",
    PauseMode.DRAIN: "wait",
}
_REFUSALS: Mapping[str, type[SluiceError]] = {
    "InvalidRequestError": InvalidRequestError,
    "NotReadyError": NotReadyError,
}


class VllmCore:
    """vLLM with the weights it serves; see `build`."""

    def __init__(
        self, client: VllmClient, layout: CheckpointLayout, settings: VllmSettings
    ) -> None:
        self.layout = layout
        self.version: int | None = None
        self.digest = ""
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self._client, self._settings = client, settings
        self._limits = ModelLimits(settings.max_model_len, layout.eos_token_ids)
        self._runs: dict[ChunkStream, RequestRun] = {}
        self._idle, self._swapping = asyncio.Event(), asyncio.Lock()
        self._is_paused = False
        self._broken: EngineError | None = None

    @classmethod
    async def build(cls, settings: VllmSettings) -> VllmCore:
        """Starts vLLM without weights.

        Raises:
            ConfigError: the path holds no model, or vLLM refuses its arguments.
        """
        device = select_device(settings.device)
        on_cpu = device.torch_device.type == "cpu"
        layout = checkpoint_layout(settings)
        set_environment(
            on_cpu=on_cpu,
            threads=settings.torch_threads,
            batch_invariant=settings.batch_invariant,
        )
        arguments = settings.engine_arguments(on_cpu=on_cpu)
        if device.torch_device.type == "npu":
            os.environ.update(ascend_environment(os.environ))
            arguments = ascend_arguments(arguments)
        client = VllmClient(arguments)
        core = cls(client, layout, settings)
        _log.info("vLLM %s runs on %s", client.features.version, device.name)
        shapes = {spec.name: spec.shape for spec in layout.tensors}
        try:
            await core._call(
                "sluice_begin",
                os.getpid(),
                "cpu" if on_cpu else settings.device,
                settings.weights_backend,
                msgspec.json.encode(shapes),
            )
        except BaseException:  # its processes do not watch this one yet
            client.close()
            raise
        return core

    @property
    def broken(self) -> EngineError | None:
        """Why nothing works any more."""
        if self._broken is None and self._client.is_broken:
            self._broken = EngineError("vLLM's engine process has ended; restart the replica")
        return self._broken

    @broken.setter
    def broken(self, error: EngineError) -> None:
        self._broken = error

    def count(self, drawn: int, prefilled: int) -> None:
        """Takes note of response tokens drawn and of prompt tokens computed."""
        self.generated_tokens += drawn
        self.prefilled_tokens += prefilled

    def new_run(
        self,
        number: int,
        request: GenerationRequest,
        pace: Pace,
        post: Callable[[list[SampleChunk]], None],
    ) -> RequestRun:
        """A run for `run`."""
        return RequestRun(self._client, number, request, self._limits, pace, self, post)

    async def run(self, run: RequestRun, stream: ChunkStream) -> None:
        """Draws a request's samples into its stream, and ends that in any case."""
        error: EngineError | None = None
        self._runs[stream] = run
        self._idle.clear()
        try:
            await run.run()
        except EngineError as failed:
            error = failed
        finally:
            del self._runs[stream]
            if not self._runs:
                self._idle.set()
            stream.end(error)

    async def cancel(self, stream: ChunkStream) -> None:
        """Aborts the samples of one stream."""
        if stream in self._runs:
            self._runs[stream].cancel()

    async def pulse(self, timeout_s: float) -> int:
        """Samples that the workers hold since their last step, asked through the engine's loop."""
        answers = await self._client.call_workers("sluice_pulse", timeout_s=timeout_s)
        return max(int(answer) for answer in answers)

    async def processes(self) -> tuple[int, ...]:
        """Ids of the workers' processes."""
        answers = await self._client.call_workers("sluice_process", timeout_s=_CALL_TIMEOUT_S)
        return tuple(int(answer) for answer in answers)

    async def _call(
        self, method: str, *arguments: object, timeout_s: float = _CALL_TIMEOUT_S
    ) -> list[object]:
        return await self._client.call_workers(method, *arguments, timeout_s=timeout_s)

    async def join(self, spec: TransferGroupSpec) -> str:
        """Joins an epoch; returns the plan's digest."""
        phase = f"joining epoch {spec.epoch}"
        _check(await self._call("sluice_join", msgspec.msgpack.encode(spec)), phase)
        outcomes = await self._outcomes(phase)
        return str(outcomes[0]["plan_digest"])

    async def stage(self, version: int) -> StagedVersion:
        """Receives a version into staging memory of every worker."""
        phase = f"staging version {version}"
        _check(await self._call("sluice_stage", version), phase)
        outcomes = await self._outcomes(phase)
        if len({str(one["digest"]) for one in outcomes}) != 1:
            raise WeightSyncError("trainer", phase, "the workers' digests differ")
        return msgspec.convert(outcomes[0], StagedVersion)

    async def _outcomes(self, phase: str) -> list[dict[str, object]]:
        """What the workers' threads have come to; a cancelled wait leaves the group."""
        pause_s = _FIRST_POLL_S
        try:
            while True:
                answers = await self._call("sluice_outcome")
                if all(answer is not None for answer in answers):
                    return _check(answers, phase)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        except asyncio.CancelledError:
            await self.abort_update(f"the call was cancelled while {phase}")
            raise

    async def swap(self, version: int, digest: str) -> float:
        """Has the model compute with what is staged; returns seconds without a token.

        Raises:
            WeightSyncError: something else is staged, or nothing; the old weights go on serving.
            EngineError: the model could not take them and is broken.
        """
        async with self._swapping:
            if (self.version, self.digest) == (version, digest):
                return 0.0
            started = time.perf_counter()
            await self._client.pause("keep", clear_cache=self._settings.recompute_kv)
            try:
                await self._apply(version, digest)
                await self._client.tag_version(str(version))
                self.version, self.digest = version, digest
            finally:
                if not self._is_paused:
                    await self._client.resume()
            return time.perf_counter() - started

    async def pause(self, mode: PauseMode) -> None:
        """Draws nothing from its return until `resume`."""
        async with self._swapping:
            self._is_paused = True
            await self._client.pause(_PAUSES[mode], clear_cache=mode is PauseMode.RECOMPUTE)

    async def resume(self) -> None:
        """Draws on."""
        async with self._swapping:
            self._is_paused = False
            await self._client.resume()

    async def _apply(self, version: int, digest: str) -> None:
        try:
            answers = await self._call("sluice_apply", version, digest, timeout_s=_APPLY_TIMEOUT_S)
        except EngineError as error:
            self.broken = error
            raise
        for answer in answers:
            if isinstance(answer, dict) and answer.get("broken"):
                detail = f"vLLM: loading version {version} failed half-way ({answer['error']})"
                self.broken = broken = EngineError(f"{detail}; restart the replica")
                raise broken
        _check(answers, f"committing version {version}")

    async def abort_update(self, reason: str) -> None:
        """Throws away what is staged and leaves the group."""
        await self._call("sluice_abort", reason)

    async def close(self) -> None:
        """Aborts what runs, has it delivered, and ends vLLM's processes."""
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._abort_runs()
                await self._call("sluice_close")
        except (TimeoutError, EngineError) as error:
            _log.warning("vLLM did not end in order: %r", error)
        finally:
            for run in self._runs.values():
                run.cancel()
            self._client.close()

    async def _abort_runs(self) -> None:
        running = [name for run in self._runs.values() for name in run.request_ids]
        if running and self.broken is None:
            await self._client.abort(running)
            await self._idle.wait()


def _check(answers: list[object], phase: str) -> list[dict[str, object]]:
    """The workers' answers, if none of them is an error."""
    checked = [msgspec.convert(answer, dict[str, object]) for answer in answers]
    for answer in checked:
        if "error" in answer:
            refusal = _REFUSALS.get(str(answer.get("kind")))
            if refusal is not None:
                raise refusal(str(answer["error"]))
            raise WeightSyncError("trainer", phase, str(answer["error"]))
    return checked
