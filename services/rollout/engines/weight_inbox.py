"""The receiving end of weight updates, for an engine that takes them between two decode steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from services.rollout.engines.live_weights import ChangedElements, NewWeights, Place
from services.rollout.engines.protocol import StagedVersion
from sluice.concurrency.waits import waiting_for
from sluice.device.protocol import Device
from sluice.errors import WeightSyncError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weights.changed_elements import changed_positions
from sluice.weights.receiver import StagedWeights, WeightReceiver

if TYPE_CHECKING:
    import torch

__all__ = ["WeightInbox"]

_T = TypeVar("_T")
_SENDER = "trainer"


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    received: StagedWeights
    weights: NewWeights


class WeightInbox:
    """One replica's membership in transfer groups, and what it has staged.

    Blocking calls run in one thread of its own. Leaving a group is possible at any moment.

    Args:
        device: of the wire.
        layout: the model's weights.
        places: what the model keeps each of them as.
    """

    def __init__(
        self, device: Device, layout: Sequence[TensorSpec], places: Mapping[str, Place]
    ) -> None:
        self._places = places
        self._receiver = WeightReceiver(device, {spec.name: spec.shape for spec in layout})
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-inbox")
        self._epoch: int | None = None
        self._staged: _Staged | None = None

    async def _run(self, call: Callable[[], _T], phase: str) -> _T:
        try:
            with waiting_for(_SENDER, phase):
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
        staged = await self._run(lambda: self._stage(version), f"staging version {version}")
        self._check_epoch(epoch, f"staging version {version}")
        self._staged, received = staged, staged.received
        return StagedVersion(version, received.digest, received.received_bytes, received.seconds)

    def _stage(self, version: int) -> _Staged:
        received = self._receiver.stage(version)
        base = self._receiver.base_of(received)
        if base is None or received.base is None:
            return _Staged(received, NewWeights(received.tensors))
        changes = {
            name: _changed(base.tensors[name], received.tensors[name], place)
            for name, place in self._places.items()
            if not place.can_borrow(received.tensors[name])
        }
        return _Staged(received, NewWeights(received.tensors, changes, received.base.digest))

    def staged(self, epoch: int, version: int, digest: str) -> NewWeights:
        """What was staged under that epoch, version and digest.

        Raises:
            WeightSyncError: something else was, or nothing.
        """
        phase = f"committing version {version}"
        self._check_epoch(epoch, phase)
        staged = None if self._staged is None else self._staged.received
        if self._staged is None or staged is None or staged.version != version:
            found = "nothing" if staged is None else f"version {staged.version}"
            raise WeightSyncError(_SENDER, phase, f"{found} is staged here; stage it first")
        if staged.digest != digest:
            raise WeightSyncError(
                _SENDER,
                phase,
                f"the digest of what is staged here is {staged.digest}, not {digest}",
            )
        return self._staged.weights

    def release(self, weights: NewWeights) -> None:
        """Gives staging memory back once its tensors serve.

        It is held as long as the model computes from it, or if the sender asked for that: the next
        update may say only what changed since.
        """
        staged = self._staged
        if staged is None or staged.weights is not weights:
            return  # the epoch was left during the swap; the memory is the model's alone
        self._staged = None
        tensors = weights.tensors
        lent = any(place.can_borrow(tensors[name]) for name, place in self._places.items())
        self._receiver.keep(staged.received, lent=lent)

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


def _changed(old: torch.Tensor, new: torch.Tensor, place: Place) -> ChangedElements:
    positions = changed_positions(old, new)
    values = new.view(-1)[positions].to(place.device, place.dtype)
    return ChangedElements(positions.to(place.device), values)
