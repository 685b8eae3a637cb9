"""What happens in vLLM's event loop: samples, probes, and weights.

Consumes: coroutines begun by the service's event loop. Produces: chunks, posted as they come.
Waits for: vLLM's processes, each call with a deadline.
On failure: of a sample, its request fails; of an apply, or of naming its version, nobody knows
which weights would draw the next token; of going on after it, nothing would be drawn: what runs
fails, and the engine is broken for good.
On shutdown: what runs is aborted and delivered, then vLLM's processes end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping

from services.rollout.engines.causal_lm import CheckpointLayout, checkpoint_layout
from services.rollout.engines.protocol import (
    GenerationRequest,
    PauseMode,
    SampleChunk,
    StagedVersion,
)
from services.rollout.engines.vendor.owner_watch import own_processes
from services.rollout.engines.vendor.samples import ModelLimits, Pace
from services.rollout.engines.vendor.thread import ChunkStream
from services.rollout.engines.vllm.client import PromptImages, VllmClient, engine_environment
from services.rollout.engines.vllm.request import VllmRequest
from services.rollout.engines.vllm.settings import (
    VllmSettings,
    ascend_arguments,
    ascend_environment,
    visible_environment,
)
from services.rollout.engines.vllm.worker_features import runner_environment
from services.rollout.engines.vllm.workers import VllmWorkers, WorkerBegin
from sluice.device.select import select_device
from sluice.errors import EngineError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.vision.image_prompts import ImagePromptReader, load_image_prompts

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 20.0
_PAUSES: Mapping[PauseMode, str] = {
    PauseMode.KEEP: "keep",
    PauseMode.RECOMPUTE: "keep",
    PauseMode.ABORT: "abort",
    PauseMode.DRAIN: "wait",
}


class VllmCore:
    """vLLM with the weights it serves; see `build`.

    Args:
        image_prompts: the model's; ``None``: it takes no images.
    """

    def __init__(
        self,
        client: VllmClient,
        layout: CheckpointLayout,
        settings: VllmSettings,
        image_prompts: ImagePromptReader | None = None,
    ) -> None:
        self.layout, self.image_prompts = layout, image_prompts
        self.version: int | None = None
        self.digest = ""
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self._client, self._settings = client, settings
        self._workers = VllmWorkers(client)
        self._limits = ModelLimits(settings.max_model_len, layout.eos_token_ids)
        self._runs: dict[ChunkStream, VllmRequest] = {}
        self._idle, self._swapping = asyncio.Event(), asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._is_paused = self._is_closing = False
        self._broken: EngineError | None = None

    @classmethod
    async def build(cls, settings: VllmSettings) -> VllmCore:
        """Starts vLLM without weights.

        Raises:
            ConfigError: the path holds no model, vLLM refuses its arguments, or its version lacks
                what is needed.
        """
        device = select_device(settings.device)
        on_cpu = device.torch_device.type == "cpu"
        layout = checkpoint_layout(
            settings.model_path,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
        )
        image_prompts = load_image_prompts(
            settings.model_path, trust_remote_code=settings.trust_remote_code
        )
        os.environ |= engine_environment(
            os.environ,
            on_cpu=on_cpu,
            threads=settings.torch_threads,
            batch_invariant=settings.batch_invariant,
        )
        os.environ |= visible_environment(
            settings.device, device.visible_devices_variable, settings.workers, os.environ
        )
        arguments = settings.engine_arguments(on_cpu=on_cpu, takes_images=image_prompts is not None)
        if device.torch_device.type == "npu":
            os.environ.update(ascend_environment(os.environ))
            arguments = ascend_arguments(arguments)
        os.environ |= runner_environment(os.environ)
        own_processes(os.environ)
        client = VllmClient(arguments, recomputes=settings.recompute_kv)
        core = cls(client, layout, settings, image_prompts)
        _log.info("vLLM %s runs on %s", client.features.version, device.name)
        reported = WorkerBegin(
            device=device.torch_device.type,
            backend=settings.weights_backend,
            shapes={spec.name: spec.shape for spec in layout.tensors},
            model_path=settings.model_path,
            trust_remote_code=settings.trust_remote_code,
        )
        try:
            await core._workers.begin(reported)
        except BaseException:  # its processes end with this one, which goes on
            client.close()
            raise
        return core

    @property
    def broken(self) -> EngineError | None:
        """Why nothing works any more."""
        if self._broken is None and self._client.is_broken:
            self._broken = EngineError("vLLM's engine process has ended; restart the replica")
        return self._broken

    def note_broken(self, error: EngineError) -> None:
        """It is `broken` for good; called in any thread."""
        self._broken = error

    def count(self, sampled: int, prefilled: int) -> None:
        """Takes note of response tokens drawn and of prompt tokens computed."""
        self.generated_tokens += sampled
        self.prefilled_tokens += prefilled

    def new_run(
        self,
        number: int,
        request: GenerationRequest,
        images: PromptImages | None,
        pace: Pace,
        post: Callable[[list[SampleChunk]], None],
    ) -> VllmRequest:
        """A run for `run`."""
        return VllmRequest(self._client, number, request, images, self._limits, pace, self, post)

    async def run(self, run: VllmRequest, stream: ChunkStream) -> None:
        """Draws a request's samples into its stream, and ends that in any case."""
        error: EngineError | None = None
        self._runs[stream] = run
        self._idle.clear()
        try:
            self._check_works()  # the engine may have broken meanwhile
            await run.run()
        except EngineError as failed:
            error = failed
        finally:
            del self._runs[stream]
            if not self._runs:
                self._idle.set()
            stream.end(self._broken or error)

    async def wait_to_begin(self) -> None:
        """See `vllm_request.Serving`.

        Raises:
            EngineError: the engine is being stopped.
        """
        await self._settled.wait()
        if self._is_closing:
            raise EngineError("the vLLM engine was stopped")

    async def cancel(self, stream: ChunkStream) -> None:
        """Aborts the samples of one stream."""
        if stream in self._runs:
            self._runs[stream].cancel()

    async def heartbeat(self, timeout_s: float) -> int:
        """Samples that the workers hold since their last step, asked through the engine's loop."""
        return await self._workers.heartbeat(timeout_s)

    async def processes(self) -> tuple[int, ...]:
        """Ids of the workers' processes."""
        return await self._workers.processes()

    async def join(self, spec: TransferGroupSpec) -> str:
        """Joins an epoch; returns the plan's digest."""
        return await self._workers.join(spec)

    async def stage(self, version: int) -> StagedVersion:
        """Receives a version into staging memory of every worker."""
        return await self._workers.stage(version)

    async def swap(self, version: int, digest: str) -> float:
        """Has the model compute with what is staged; returns seconds without a token.

        Raises:
            WeightSyncError: something else is staged, or nothing; the old weights go on serving.
            EngineError: the model could not take them, or vLLM does not draw on; the engine is
                broken.
        """
        async with self._swapping:
            self._check_works()
            if (self.version, self.digest) == (version, digest):
                return 0.0
            await self._workers.check_staged(version, digest)
            started = time.perf_counter()
            self._settled.clear()
            try:
                await self._client.pause("keep", clear_cache=self._settings.recompute_kv)
                await self._take(version, digest)
            finally:
                self._settled.set()
                if self._broken is None and not self._is_paused:
                    await self._resume_sampling(version)
            return time.perf_counter() - started

    async def swapped(self) -> None:
        """Returns when no swap is under way; a version is named before its swap has ended.

        Raises:
            EngineError: the engine is broken, as by a swap after which it does not draw on.
        """
        async with self._swapping:
            self._check_works()

    async def pause(self, mode: PauseMode) -> None:
        """Draws nothing from its return until `resume`."""
        async with self._swapping:
            self._check_works()
            await self._client.pause(_PAUSES[mode], clear_cache=mode is PauseMode.RECOMPUTE)
            self._is_paused = True

    async def resume(self) -> None:
        """Draws on."""
        async with self._swapping:
            self._check_works()
            await self._client.resume()
            self._is_paused = False

    async def _resume_sampling(self, version: int) -> None:
        """An engine that stayed paused would hold its samples for ever and take new ones."""
        try:
            await self._client.resume()
        except EngineError as error:
            broken = EngineError(f"{error}, after version {version} came; restart the replica")
            self._break(broken, version)
            raise broken from error

    async def _take(self, version: int, digest: str) -> None:
        try:
            await self._workers.apply(version, digest)
            await self._client.forget_encoded_images()
            await self._client.tag_version(str(version))
        except WeightSyncError:  # no worker has it: the old weights go on serving
            raise
        except BaseException as error:
            self._break(error, version)
            raise
        self.version, self.digest = version, digest

    def _break(self, error: BaseException, version: int) -> None:
        """Ends what runs: its tokens would be labelled with weights that did not draw them."""
        if not isinstance(error, EngineError):
            error = EngineError(
                f"vLLM: taking version {version} failed ({error!r}); restart the replica"
            )
        self._broken = error
        for run in self._runs.values():
            run.cancel()

    def _check_works(self) -> None:
        if self.broken is not None:
            raise self.broken

    async def abort_update(self, reason: str) -> None:
        """Throws away what is staged and leaves the group."""
        await self._workers.abort(reason)

    async def close(self) -> None:
        """Aborts what runs, has it delivered, and ends vLLM's processes."""
        self._is_closing = True
        self._settled.set()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._abort_runs()
                await self._workers.close()
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
