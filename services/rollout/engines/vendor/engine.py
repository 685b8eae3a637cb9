"""A vendor's engine behind the engine Protocol, as the service's event loop sees it.

Weights go straight to the workers of the vendor's engine; each is a rank of the transfer group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from services.rollout.engines.protocol import StagedVersion
from services.rollout.engines.threaded_engine import ThreadedEngine
from services.rollout.engines.vendor.core import VendorCore
from services.rollout.engines.weight_inbox import check_epoch
from sluice.types import TransferGroupSpec
from sluice.weight_share import WeightShare

CoreT = TypeVar("CoreT", bound=VendorCore)


class VendorEngine(ThreadedEngine[CoreT]):
    """See `services.rollout.engines.protocol.Engine`."""

    _epoch: int | None = None

    @property
    def weight_shares(self) -> Sequence[WeightShare]:
        """The weights that each of its workers takes."""
        return self._in_thread()[1].workers.shares

    async def stop(self) -> None:
        """Abort what runs and free everything. Repeating it is harmless."""
        self._epoch = None
        await super().stop()

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Join one epoch's transfer group, leaving any earlier one; return the plan's digest."""
        thread, core = self._in_thread()
        self._epoch = spec.epoch
        await thread.call(core.wake(), f"waking for epoch {spec.epoch}")
        phase = f"joining epoch {spec.epoch}"
        check_epoch(spec.epoch, self._epoch, phase)  # it may have been aborted meanwhile
        return await thread.call(core.workers.join(spec), phase)

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receive one version into staging memory while sampling continues."""
        thread, core = self._in_thread()
        phase = f"staging version {version}"
        check_epoch(epoch, self._epoch, phase)
        await thread.call(core.wake(), f"waking for version {version}")
        check_epoch(epoch, self._epoch, phase)  # it may have been aborted meanwhile
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
