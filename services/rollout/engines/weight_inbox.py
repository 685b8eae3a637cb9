"""The receiving end of weight updates, for an engine that takes them between two decode steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.rollout.engines.protocol import StagedVersion
from sluice.device.protocol import Device
from sluice.errors import WeightSyncError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weights.receiver import StagedWeights, WeightReceiver

__all__ = ["WeightInbox"]

_T = TypeVar("_T")
_SENDER = "trainer"


class WeightInbox:
    """One replica's membership in transfer groups, and what it has staged.

    Blocking calls run in one thread of its own. Leaving a group is possible at any moment.
    """

    def __init__(self, device: Device, layout: Sequence[TensorSpec]) -> None:
        self._receiver = WeightReceiver(device, {spec.name: spec.shape for spec in layout})
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-inbox")
        self._epoch: int | None = None
        self._staged: StagedWeights | None = None

    async def _run(self, call: Callable[[], _T], phase: str) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except asyncio.CancelledError:
            # The thread cannot be interrupted; without the group its call ends by itself.
            self._receiver.abort(f"the call was cancelled while {phase}")
            raise

    async def join(self, spec: TransferGroupSpec) -> str:
        """Joins an epoch, leaving any earlier one; returns the plan's digest."""
        self._receiver.abort(f"epoch {spec.epoch} begins")
        self._epoch, self._staged = spec.epoch, None

        def join_unless_superseded() -> str:
            self._check_epoch(spec.epoch, "joining")
            return self._receiver.join(spec)

        return await self._run(join_unless_superseded, f"joining epoch {spec.epoch}")

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receives a version into staging memory."""
        self._check_epoch(epoch, f"staging version {version}")
        self._staged = None
        staged = await self._run(
            lambda: self._receiver.stage(version), f"staging version {version}"
        )
        self._check_epoch(epoch, f"staging version {version}")
        self._staged = staged
        return StagedVersion(version, staged.digest, staged.received_bytes, staged.seconds)

    def staged(self, epoch: int, version: int, digest: str) -> StagedWeights:
        """What was staged under that epoch, version and digest.

        Raises:
            WeightSyncError: something else was, or nothing.
        """
        phase = f"committing version {version}"
        self._check_epoch(epoch, phase)
        staged = self._staged
        if staged is None or staged.version != version:
            found = "nothing" if staged is None else f"version {staged.version}"
            raise WeightSyncError(_SENDER, phase, f"{found} is staged here; stage it first")
        if staged.digest != digest:
            raise WeightSyncError(
                _SENDER,
                phase,
                f"the digest of what is staged here is {staged.digest}, not {digest}",
            )
        return staged

    def release(self, staged: StagedWeights) -> None:
        """Gives staging memory back once its tensors were copied and serve.

        What was staged is held as long as it serves, if the sender asked for that: the next update
        may say only what changed since.
        """
        if self._staged is staged:
            self._staged = None
        self._receiver.keep(staged)

    def abort(self, epoch: int, reason: str) -> None:
        """Throws away what is staged and leaves the epoch; nothing happens for another epoch."""
        if epoch == self._epoch:
            self._epoch, self._staged = None, None
            self._receiver.abort(reason)

    def close(self) -> None:
        """Leaves the group and lets the thread end."""
        self._epoch, self._staged = None, None
        self._receiver.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_epoch(self, epoch: int, phase: str) -> None:
        if epoch != self._epoch:
            raise WeightSyncError(
                _SENDER, phase, f"epoch {epoch} is not joined here; the epoch is {self._epoch}"
            )
