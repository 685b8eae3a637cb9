"""vLLM behind the engine Protocol.

vLLM's client runs in the thread of the engine, where `VllmCore` calls it; see
`vendor_engines.engine` for what that waits for and how it fails. vLLM's engine and workers are
processes, and `vllm.worker_extension` brings the weights into them. `VllmEngine` is what the
service's event loop sees of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import AsyncIterator
from functools import partial

from services.rollout.engines.causal_lm import expert_routers
from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.threaded_engine import ThreadedEngine
from services.rollout.engines.vendor_engines.engine import VendorCore, described_model
from services.rollout.engines.vendor_engines.owner_watch import end_children_with_owner
from services.rollout.engines.vendor_engines.request import (
    EngineDelta,
    PromptImages,
    RequestRun,
    VendorSample,
)
from services.rollout.engines.vllm.client import (
    VllmClient,
    engine_environment,
    installed_vllm,
    read_images,
)
from services.rollout.engines.vllm.settings import (
    VllmSettings,
    ascend_arguments,
    ascend_environment,
    visible_environment,
    vllm_settings,
)
from sluice.config.run import RunConfig
from sluice.device.select import select_device
from sluice.errors import EngineError
from sluice.vision.image_prompts import ImagePromptReader

_log = logging.getLogger(__name__)
_SEED_BYTES = 8


def create(config: RunConfig) -> VllmEngine:
    """Return the engine for a run configuration; see `create_engine` for errors."""
    return VllmEngine(vllm_settings(config))


class VllmCore(VendorCore):
    """vLLM with the weights that it serves; see `build`."""

    name = "vLLM"
    client: VllmClient
    settings: VllmSettings

    @classmethod
    async def build(cls, settings: VllmSettings) -> VllmCore:
        """Start vLLM; see `Engine.start` for errors."""
        device = select_device(settings.device)
        on_cpu = device.torch_device.type == "cpu"
        described = described_model(settings)
        expert_layers = sorted(expert_routers(described.model)) if settings.with_routing else ()
        # vLLM and its processes read these variables at import, which `VllmClient` begins.
        os.environ |= engine_environment(
            os.environ,
            on_cpu=on_cpu,
            threads=settings.torch_threads,
            batch_invariant=settings.batch_invariant,
            with_routing=settings.with_routing,
            version=installed_vllm() or "",
        )
        os.environ |= visible_environment(
            settings.device, device.visible_devices_variable, settings.workers, os.environ
        )
        arguments = settings.engine_arguments(
            on_cpu=on_cpu, takes_images=described.image_prompts is not None
        )
        if device.torch_device.type == "npu":
            os.environ.update(ascend_environment(os.environ))
            arguments = ascend_arguments(arguments)
        end_children_with_owner(os.environ)
        client = VllmClient(
            arguments, recomputes=settings.recompute_kv, expert_layers=expert_layers
        )
        core = cls(client, described.layout, settings, described.image_prompts)
        _log.info("vLLM %s runs on %s", client.features.version, device.name)
        await core.open(device.torch_device.type)
        return core

    @property
    def broken(self) -> EngineError | None:
        if self._broken is None and self.client.is_broken:
            self._broken = EngineError("vLLM's engine process has ended; restart the replica")
        return self._broken

    def read_images(self, request: GenerationRequest, reader: ImagePromptReader) -> PromptImages:
        return read_images(request, reader)

    def seed(self, request: GenerationRequest, index: int, num_continued: int) -> int:
        """Return 63 bits of (seed, sample, first token).

        vLLM seeds a generator for each of its requests, not for each token.
        """
        text = f"{request.sampling.seed} {index} {num_continued}".encode()
        digest = hashlib.blake2b(text, digest_size=_SEED_BYTES).digest()
        return int.from_bytes(digest, "little") >> 1

    def deltas(self, run: RequestRun, sample: VendorSample) -> AsyncIterator[EngineDelta]:
        # The salt lets samples of one version share the prompt's cache, and keeps others out of it.
        return self.client.generate(
            _request_id(run, sample),
            sample.prompt,
            str(self.serving_version()),
            sample.choice,
            run.request.priority,
            images=run.images,
            count_known=None if run.reads_tokens else sample.num_taken,
        )

    def so_far(self, run: RequestRun, sample: VendorSample) -> EngineDelta | None:
        """Return the tokens that vLLM's client has of a running sample beyond those taken."""
        return self.client.so_far(_request_id(run, sample), sample.num_taken())

    async def check_alive(self, timeout_s: float) -> int:
        """Ask through the engine's loop for the samples that workers hold since their last step."""
        await self.wait_until_swapped()  # it has a longer deadline of its own
        num_held = await self.workers.check_alive(timeout_s)
        self.catch_up()
        return num_held

    async def sleep(self) -> bool:
        """Move the weights to host memory and free the cache, until `wake`; sample nothing."""
        async with self._swapping:
            self._check_works()
            if not self.settings.sleeps:
                return False
            if not self.is_asleep:
                # Before the calls: one that fails may have put some workers to sleep.
                self.is_asleep = True
                await self.client.pause(recomputes=True)
                self.catch_up()
                await self.client.sleep()
            return True

    async def wake(self) -> None:
        """Bring weights and cache back and sample again, after a sleep.

        Raises:
            EngineError: the memory is not there; the engine is broken.
        """
        async with self._swapping:
            self._check_works()
            if not self.is_asleep:
                return
            try:
                await self.client.wake()
                await self.client.resume()
            except EngineError as error:
                broken = EngineError(f"{error}; the trainer left too little memory, or vLLM failed")
                self._break(broken)
                raise broken from error
            self.is_asleep = False

    async def _note_weights(self, version: int) -> None:
        # In this order: until the tag, vLLM labels tokens with the old version.
        await self.client.forget_encoded_images()
        await self.client.tag_version(str(version))


def _request_id(run: RequestRun, sample: VendorSample) -> str:
    return f"{run.number}-{sample.index}"


class VllmEngine(ThreadedEngine[VllmCore]):
    """See `services.rollout.engines.protocol.Engine`.

    A sample that is continued gets other random numbers than it would have had without the break:
    vLLM seeds a generator for each of its requests, not for each token.
    """

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(VllmCore.name, settings, partial(VllmCore.build, settings))
