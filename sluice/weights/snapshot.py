"""Snapshots of a model's weights, which are broadcast while the next update is computed.

Two buffers take turns. The newest complete version can be read (by a broadcast, again by one for
a newcomer) while the next version is written into the other one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sluice.errors import DeadlineError, InvalidRequestError, NotReadyError
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE, Holding
from sluice.weights.holdings import held_part
from sluice.weights.plan import MIN_BUCKET_BYTES, WeightBuffer, plan_transfer


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All weights of one version, or a rank's part of them, in CPU memory; read-only.

    `serial` is unique in its `SnapshotBuffers`, also for a version that was written twice.
    """

    version: int
    weights: WeightBuffer
    serial: int


class SnapshotBuffers:
    """Two sets of weights in CPU memory, reused version after version.

    Memory: twice the weights in their wire dtype, or twice the rank's part of them. One writer, any
    number of readers, any threads. `plan` is the layout of each.

    Args:
        tensors: the weights as they travel; see `sluice.weights.plan.tensor_specs`.
        constant: names of those that never change; only the first write needs them.
        holding: the part of the weights that is kept; ``None``: all of them.
        is_pinned: in memory that a device copies to directly.
    """

    def __init__(
        self,
        tensors: Iterable[TensorSpec],
        constant: Collection[str] = frozenset(),
        holding: Holding | None = None,
        *,
        is_pinned: bool = False,
    ) -> None:
        specs = tuple(tensors)
        part = held_part(specs, WHOLE, holding)
        if part is None:
            raise InvalidRequestError("a snapshot: the rank holds none of the weights")
        # Memory has the layout of the wire, which does not depend on the size of buckets.
        plan = plan_transfer(part[0], MIN_BUCKET_BYTES, part[1])
        self.plan = plan
        self._constant = frozenset(constant) & {spec.name for spec in plan.tensors}
        slots = [_SnapshotSlot(WeightBuffer(plan, is_pinned=is_pinned)) for _ in range(2)]
        self._slots = (slots[0], slots[1])
        self._newest: _SnapshotSlot | None = None
        self._serial = 0
        self._released = threading.Condition()

    @property
    def version(self) -> int | None:
        """Return the newest complete version; ``None`` before the first."""
        newest = self._newest
        return None if newest is None else newest.version

    def write(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, timeout_s: float
    ) -> Snapshot:
        """Copy weights, converting to the wire dtypes, and make them the newest version.

        Args:
            named_tensors: exactly those planned, on any device, in any order; each whole or in
                several parts, its rows in order. After the first write without the constant ones.
            version: of these weights.
            timeout_s: how long to wait for readers of the version before the newest one.

        Raises:
            DeadlineError: that version is still being read.
            InvalidRequestError: other names or shapes than planned; the newest version stays.
        """
        slot = self._back_slot(timeout_s)
        before = self._newest
        if before is not None and not slot.has_constant:
            _copy(((n, before.weights.tensors[n]) for n in self._constant), slot.weights)
        missing = _copy(named_tensors, slot.weights)
        if before is not None:
            missing -= self._constant
        if missing:
            raise InvalidRequestError(
                f"weights: {sorted(missing)[:5]} are planned but were not given whole"
            )
        slot.has_constant = True
        with self._released:
            self._serial += 1
            slot.version, slot.serial = version, self._serial
            self._newest = slot
            return slot.snapshot(version)

    @contextmanager
    def read(self) -> Iterator[Snapshot]:
        """Read the newest version; its memory is not overwritten inside the block.

        Raises:
            NotReadyError: nothing was written yet.
        """
        with self._released:
            slot = self._newest
            if slot is None or slot.version is None:
                raise NotReadyError("no snapshot of the weights was written yet")
            slot.readers += 1
            snapshot = slot.snapshot(slot.version)
        try:
            yield snapshot
        finally:
            self._release(slot)

    @contextmanager
    def read_version(self, version: int) -> Iterator[Snapshot]:
        """Read a version as `read` does: the newest one or the one before it.

        Raises:
            NotReadyError: it was not written, or is overwritten.
        """
        with self._released:
            slots = [s for s in self._slots if s.serial is not None and s.version == version]
            if not slots:
                raise NotReadyError(f"version {version}: no snapshot holds it; publish a newer one")
            slot = max(slots, key=lambda one: one.serial or 0)
            slot.readers += 1
            snapshot = slot.snapshot(version)
        try:
            yield snapshot
        finally:
            self._release(slot)

    @contextmanager
    def read_again(self, earlier: Snapshot) -> Iterator[WeightBuffer | None]:
        """Read an earlier snapshot; ``None`` if it is overwritten. It stays whole inside the block.

        That can be the newest version or the one before it. Keep the block short: `write` waits for
        it.
        """
        with self._released:
            slot = next((slot for slot in self._slots if slot.serial == earlier.serial), None)
            if slot is not None:
                slot.readers += 1
        try:
            yield None if slot is None else slot.weights
        finally:
            if slot is not None:
                self._release(slot)

    def _release(self, slot: _SnapshotSlot) -> None:
        with self._released:
            slot.readers -= 1
            self._released.notify_all()

    def _back_slot(self, timeout_s: float) -> _SnapshotSlot:
        """Wait until the older slot has no reader, hide it from readers, and return it."""
        deadline = time.monotonic() + timeout_s
        with self._released:
            slot = self._slots[1] if self._newest is self._slots[0] else self._slots[0]
            while slot.readers:
                if not self._released.wait(max(0.0, deadline - time.monotonic())):
                    raise DeadlineError(
                        f"{slot.readers} reader(s) of version {slot.version}",
                        "waiting to overwrite its snapshot",
                        timeout_s,
                        "end or abandon that broadcast first",
                    )
            slot.serial = None  # `read_again` must not find it while it is overwritten
            return slot


class _SnapshotSlot:
    """One buffer, what it holds, and how many read it."""

    def __init__(self, weights: WeightBuffer) -> None:
        self.weights = weights
        self.version: int | None = None
        self.serial: int | None = None
        self.readers = 0
        self.has_constant = False

    def snapshot(self, version: int) -> Snapshot:
        """Return what it holds, which is `version`."""
        return Snapshot(version, self.weights, self.serial or 0)


@torch.no_grad()
def _copy(named_tensors: Iterable[tuple[str, torch.Tensor]], target: WeightBuffer) -> set[str]:
    """Return the names of those that were not given whole.

    Raises:
        InvalidRequestError: one that was given does not fit.
    """
    written: dict[str, int] = {}
    for name, tensor in named_tensors:
        if name not in target.tensors:
            raise InvalidRequestError(f"weights: {name} is not planned")
        # A scalar is one row.
        rows = target.tensors[name].view(target.tensors[name].shape or (1,))
        given = tensor.reshape(tensor.shape or (1,))
        start = written.get(name, 0)
        stop = start + given.shape[0]
        if given.shape[1:] != rows.shape[1:] or stop > rows.shape[0]:
            twice = " more, or was given twice" if start else ""
            raise InvalidRequestError(
                f"weights: {name} has shape {tuple(tensor.shape)}{twice}, planned was "
                f"{tuple(target.tensors[name].shape)}"
            )
        rows[start:stop].copy_(given)
        written[name] = stop
        del tensor, given  # a stream makes the next rows meanwhile
    return {n for n, t in target.tensors.items() if written.get(n) != (t.shape or (1,))[0]}
