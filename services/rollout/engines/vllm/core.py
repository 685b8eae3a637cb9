"""vLLM in the event loop of its client: samples, probes, sleep, and swaps of weights.

See `vendor.core` for what it waits for and how it fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from services.rollout.engines.causal_lm import CheckpointLayout, build_causal_lm, expert_routers
from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.vendor.checkpoint_names import check_files
from services.rollout.engines.vendor.core import VendorCore
from services.rollout.engines.vendor.owner_watch import own_processes
from services.rollout.engines.vendor.request import Delta, RequestRun, VendorSample
from services.rollout.engines.vendor.weight_workers import WeightWorkers, WorkerBegin
from services.rollout.engines.vllm.client import PromptInputs, VllmClient, engine_environment
from services.rollout.engines.vllm.settings import (
    VllmSettings,
    ascend_arguments,
    ascend_environment,
    visible_environment,
)
from services.rollout.engines.vllm.worker_features import runner_environment
from sluice.device.select import select_device
from sluice.errors import EngineError, NotReadyError
from sluice.vision.image_prompts import ImagePromptReader

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 20.0
_SEED_BYTES = 8


class VllmCore(VendorCore):
    """vLLM with the weights that it serves; see `build`.

    Args:
        image_prompts: the model's; ``None`` if it takes no images.
    """

    name = "vLLM"

    def __init__(
        self,
        client: VllmClient,
        layout: CheckpointLayout,
        settings: VllmSettings,
        image_prompts: ImagePromptReader | None = None,
    ) -> None:
        super().__init__(layout, settings.max_model_len, WeightWorkers(client, self.name))
        self.image_prompts = image_prompts
        self._client = client
        self._settings = settings
        self._settled = asyncio.Event()
        self._settled.set()
        self._is_closing = False
        self._is_asleep = False

    @classmethod
    async def build(cls, settings: VllmSettings) -> VllmCore:
        """Start vLLM.

        Raises:
            CheckpointError: a file of weights that it is to serve is missing or damaged.
            ConfigError: the path holds no model, vLLM refuses its arguments, or its version lacks
                what is needed.
        """
        device = select_device(settings.device)
        on_cpu = device.torch_device.type == "cpu"
        described = build_causal_lm(
            settings.model_path,
            torch.device("meta"),
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
        )
        if settings.serves_model_files:
            check_files(Path(settings.model_path), described)
        layout, image_prompts = described.layout, described.image_prompts
        expert_layers = sorted(expert_routers(described.model)) if settings.with_routing else ()
        # vLLM and its processes read these variables at import, which `VllmClient` begins.
        os.environ |= engine_environment(
            os.environ,
            on_cpu=on_cpu,
            threads=settings.torch_threads,
            batch_invariant=settings.batch_invariant,
            with_routing=settings.with_routing,
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
        client = VllmClient(
            arguments, recomputes=settings.recompute_kv, expert_layers=expert_layers
        )
        core = cls(client, layout, settings, image_prompts)
        _log.info("vLLM %s runs on %s", client.features.version, device.name)
        begin = WorkerBegin(
            device=device.torch_device.type,
            backend=settings.weights_backend,
            tensors=layout.tensors,
            model_path=settings.model_path,
            trust_remote_code=settings.trust_remote_code,
        )
        try:
            await core.workers.begin(begin)
            if settings.serves_model_files:
                await core.serve_files()
        except BaseException:  # its processes end with this one only, and this one may live on
            client.close()
            raise
        core.kv_tokens = client.kv_tokens
        return core

    @property
    def broken(self) -> EngineError | None:
        """Why the engine is broken; ``None`` while it works."""
        if self._broken is None and self._client.is_broken:
            self._broken = EngineError("vLLM's engine process has ended; restart the replica")
        return self._broken

    def seed(self, request: GenerationRequest, index: int, num_continued: int) -> int:
        """Return 63 bits of (seed, sample, first token).

        vLLM seeds a generator for each of its requests, not for each token.
        """
        text = f"{request.sampling.seed} {index} {num_continued}".encode()
        digest = hashlib.blake2b(text, digest_size=_SEED_BYTES).digest()
        return int.from_bytes(digest, "little") >> 1

    def deltas(self, run: RequestRun, sample: VendorSample) -> AsyncIterator[Delta]:
        """Sample one sample; closing the iterator aborts it."""
        # The salt lets samples of one version share the prompt's cache, and keeps others out of it.
        inputs = PromptInputs(sample.prompt, str(self.serving_version()), run.images)
        name = _request_id(run, sample)
        known = None if run.reads_tokens else sample.num_taken
        return self._client.generate(name, inputs, sample.choice, run.request.priority, known)

    def so_far(self, run: RequestRun, sample: VendorSample) -> Delta | None:
        """Return the tokens that vLLM's client has of a running sample beyond those taken."""
        return self._client.so_far(_request_id(run, sample), sample.num_taken())

    async def wait_to_begin(self) -> None:
        """Wait until no swap is under way: `version` samples what begins then.

        Raises:
            EngineError: the engine is being stopped.
        """
        await self._settled.wait()
        if self._is_closing:
            raise EngineError("the vLLM engine was stopped")

    async def heartbeat(self, timeout_s: float) -> int:
        """Ask through the engine's loop for the samples that workers hold since their last step."""
        held = await self.workers.heartbeat(timeout_s)
        self.catch_up()
        return held

    async def swap(self, version: int, digest: str) -> float:
        """Make the model compute with the staged weights; return the seconds without a token.

        Raises:
            NotReadyError: it sleeps.
            WeightSyncError: something else is staged, or nothing; the old weights stay.
            EngineError: the model could not take the weights, or vLLM does not resume; the engine
                is broken.
        """
        async with self._swapping:
            self._check_works()
            if (self.version, self.digest) == (version, digest):
                return 0.0
            self._check_awake("swaps no weights")
            # Before the pause: a refusal must not cost any sampling.
            await self.workers.check_staged(version, digest)
            started = time.perf_counter()
            # A sample that came now would be sent under a version that may not sample it.
            self._settled.clear()
            try:
                await self._client.pause(clear_cache=self._settings.recompute_kv)
                self.catch_up()  # what came so far is the old version's
                await self._take(version, digest)
            finally:
                self._settled.set()
                if self._broken is None:
                    await self._resume_after_swap(self._client.resume(), version)
            return time.perf_counter() - started

    @property
    def is_asleep(self) -> bool:
        """Whether it sleeps, or may be half asleep; other threads may read it."""
        return self._is_asleep

    def _check_awake(self, consequence: str) -> None:
        if self._is_asleep:
            raise NotReadyError(
                f"vLLM sleeps while the trainer trains, and {consequence}; try again after the "
                "next version"
            )

    async def sleep(self) -> bool:
        """Move the weights to host memory and free the cache, until `wake`; sample nothing."""
        async with self._swapping:
            self._check_works()
            if not self._settings.sleeps:
                return False
            if not self._is_asleep:
                # Before the calls: one that fails may have put some workers to sleep.
                self._is_asleep = True
                await self._client.pause(clear_cache=True)
                self.catch_up()
                await self._client.sleep()
            return True

    async def wake(self) -> None:
        """Bring weights and cache back and sample again, after a sleep.

        Raises:
            EngineError: the memory is not there; the engine is broken.
        """
        async with self._swapping:
            self._check_works()
            if not self._is_asleep:
                return
            try:
                await self._client.wake()
                await self._client.resume()
            except EngineError as error:
                broken = EngineError(f"{error}; the trainer left too little memory, or vLLM failed")
                self._break(broken)
                raise broken from error
            self._is_asleep = False

    async def _note_weights(self, version: int) -> None:
        # In this order: until the tag, vLLM labels tokens with the old version.
        await self._client.forget_encoded_images()
        await self._client.tag_version(str(version))

    async def close(self) -> None:
        """Abort what runs, deliver it, and end vLLM's processes."""
        # Samples that wait for a swap are refused instead of sent.
        self._is_closing = True
        self._settled.set()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._abort_runs()
                await self.workers.close()
        except (TimeoutError, EngineError) as error:
            _log.warning("vLLM did not end in order: %r", error)
        finally:
            for run in self._runs:
                run.cancel()
            self._client.close()

    async def _abort_runs(self) -> None:
        running = [_request_id(run, sample) for run in self._runs for sample in run.open]
        if running and self.broken is None:
            await self._client.abort(running)
            await self._idle.wait()


def _request_id(run: RequestRun, sample: VendorSample) -> str:
    return f"{run.number}-{sample.index}"
