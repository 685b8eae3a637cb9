"""Snapshots of a model's weights, to be broadcast while the next update is computed.

Two buffers alternate. The newest complete version can be read (by broadcasts) while the next
version is written into the other buffer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
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
    """All weights of one version, or a rank's part of them, in CPU memory; read-only."""

    version: int
    weights: WeightBuffer


class SnapshotBuffers:
    """Two sets of weights in CPU memory, reused version after version.

    Memory: twice the weights in their wire dtype, or twice the rank's part of them. One writer, any
    number of readers, any threads. `plan` is the layout of each.

    Args:
        tensors: the weights as they are sent; see `sluice.weights.plan.tensor_specs`.
        constant: names of weights that never change; only the first write needs them.
        holding: the part of the weights to keep; ``None`` for all.
        beside: the device of the weights.
    """

    def __init__(
        self,
        tensors: Iterable[TensorSpec],
        constant: Collection[str] = frozenset(),
        holding: Holding | None = None,
        *,
        beside: torch.device | None = None,
    ) -> None:
        specs = tuple(tensors)
        part = held_part(specs, WHOLE, holding)
        if part is None:
            raise InvalidRequestError("a snapshot: the rank holds none of the weights")
        # Memory has the layout of the wire, which does not depend on the size of buckets.
        plan = plan_transfer(part[0], MIN_BUCKET_BYTES, part[1])
        self.plan = plan
        self._constant = frozenset(constant) & {spec.name for spec in plan.tensors}
        slots = [_SnapshotSlot(WeightBuffer(plan, beside=beside)) for _ in range(2)]
        self._slots = (slots[0], slots[1])
        self._newest: _SnapshotSlot | None = None
        self._released = threading.Condition()

    @property
    def version(self) -> int | None:
        """Return the newest complete version; ``None`` before the first."""
        newest = self._newest
        return None if newest is None or newest.snapshot is None else newest.snapshot.version

    def write(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, timeout_s: float
    ) -> Snapshot:
        """Copy weights, converting to the wire dtypes, and make them the newest version.

        Args:
            named_tensors: exactly those planned, on any device, in any order; each whole or in
                several parts, its rows in order. After the first write without the constant ones.
            timeout_s: how long to wait for readers of the version before the newest one.

        Raises:
            DeadlineError: that version is still being read.
            InvalidRequestError: other names or shapes than planned; the newest version stays.
        """
        slot = self._back_slot(timeout_s)
        newest = self._newest
        if newest is not None and not slot.has_constant:
            _copy(((n, newest.weights.tensors[n]) for n in self._constant), slot.weights)
        missing = _copy(named_tensors, slot.weights)
        if newest is not None:
            missing -= self._constant
        if missing:
            raise InvalidRequestError(
                f"weights: {sorted(missing)[:5]} are planned but were not given whole"
            )
        slot.has_constant = True
        with self._released:
            slot.snapshot = Snapshot(version, slot.weights)
            self._newest = slot
            return slot.snapshot

    @contextmanager
    def read(self, version: int | None = None) -> Iterator[Snapshot]:
        """Read a version: the newest one, by default, or the one before it.

        Its memory is not overwritten inside the block.

        Raises:
            NotReadyError: it was not written yet, or is overwritten.
        """
        with self._read(lambda s: version in (None, s.version)) as snapshot:
            if snapshot is None:
                name = "the weights" if version is None else f"version {version}"
                raise NotReadyError(f"no snapshot holds {name}; publish a newer version")
            yield snapshot

    @contextmanager
    def read_again(self, earlier: Snapshot) -> Iterator[WeightBuffer | None]:
        """Read an earlier snapshot, which stays intact inside the block; ``None`` if it is
        overwritten.

        That can be the newest version or the one before it. Keep the block short: `write` waits for
        it.
        """
        with self._read(lambda s: s is earlier) as snapshot:
            yield None if snapshot is None else snapshot.weights

    @contextmanager
    def _read(self, is_wanted: Callable[[Snapshot], bool]) -> Iterator[Snapshot | None]:
        """Read the newest snapshot that is wanted; ``None`` if there is none."""
        with self._released:
            newest_first = sorted(self._slots, key=lambda slot: slot is not self._newest)
            free = (s for s in newest_first if s.snapshot is not None and is_wanted(s.snapshot))
            slot = next(free, None)
            snapshot = None if slot is None else slot.snapshot
            if slot is not None:
                slot.readers += 1
        try:
            yield snapshot
        finally:
            if slot is not None:
                with self._released:
                    slot.readers -= 1
                    self._released.notify_all()

    def _back_slot(self, timeout_s: float) -> _SnapshotSlot:
        """Wait until the older slot has no reader, hide it from readers, and return it."""
        deadline = time.monotonic() + timeout_s
        with self._released:
            slot = self._slots[1] if self._newest is self._slots[0] else self._slots[0]
            while slot.readers and slot.snapshot is not None:
                if not self._released.wait(max(0.0, deadline - time.monotonic())):
                    raise DeadlineError(
                        f"{slot.readers} reader(s) of version {slot.snapshot.version}",
                        "waiting to overwrite its snapshot",
                        timeout_s,
                        "end or abandon that broadcast first",
                    )
            slot.snapshot = None  # nothing must read it while it is overwritten
            return slot


@dataclass(slots=True, eq=False)
class _SnapshotSlot:
    """One buffer, what it holds, and how many read it."""

    weights: WeightBuffer
    snapshot: Snapshot | None = None
    readers: int = 0
    has_constant: bool = False


@torch.no_grad()
def _copy(named_tensors: Iterable[tuple[str, torch.Tensor]], target: WeightBuffer) -> set[str]:
    """Return the names of weights that were not given whole.

    Raises:
        InvalidRequestError: a given tensor does not fit.
    """
    written: dict[str, int] = {}
    for name, tensor in named_tensors:
        if name not in target.tensors:
            raise InvalidRequestError(f"weights: {name} is not planned")
        # A scalar is one row.
        rows = target.tensors[name].view(target.tensors[name].shape or (1,))
        values = tensor.reshape(tensor.shape or (1,))
        start = written.get(name, 0)
        stop = start + values.shape[0]
        if values.shape[1:] != rows.shape[1:] or stop > rows.shape[0]:
            detail = " more, or was given twice" if start else ""
            raise InvalidRequestError(
                f"weights: {name} has shape {tuple(tensor.shape)}{detail}, planned was "
                f"{tuple(target.tensors[name].shape)}"
            )
        # A copy that converts would bring the wider values to pageable memory, and convert there.
        rows[start:stop].copy_(values if values.device.type == "cpu" else values.to(rows.dtype))
        written[name] = stop
        del tensor, values  # a stream makes the next rows meanwhile
    return {n for n, t in target.tensors.items() if written.get(n) != (t.shape or (1,))[0]}
