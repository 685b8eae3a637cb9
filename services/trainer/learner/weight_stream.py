"""Assemble tensors from the ranks' parts, bucket by bucket, in any layout.

The layouts say which rank holds which piece. For each bucket, the holders send the rows that fall
into it, and its receiver assembles it. The receiver holds one bucket, plus at most another of
non-contiguous pieces. No gather collective is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.tensor_layouts import TensorLayout, TensorLayouts, TensorShard, region

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows ``[start, stop)`` of a tensor."""

    name: str
    start: int
    stop: int


def cut_buckets(
    layouts: TensorLayouts, names: Iterable[str], bucket_bytes: int
) -> Iterator[list[TensorRows]]:
    """Cut tensors into buckets of whole rows; empty tensors are included.

    Args:
        bucket_bytes: size of a bucket; a longer row gets a bucket of its own.
    """
    bucket: list[TensorRows] = []
    bytes_left = bucket_bytes
    for name in names:
        layout = layouts[name]
        row_bytes = max(1, layout.row_bytes)
        start, rows = 0, layout.shape[0]
        while start < rows or not rows:
            if bucket and bytes_left < row_bytes:
                yield bucket
                bucket, bytes_left = [], bucket_bytes
            stop = min(rows, start + max(1, bytes_left // row_bytes))
            bucket.append(TensorRows(name, start, stop))
            bytes_left -= (stop - start) * row_bytes
            start = stop
            if not rows:
                break
    if bucket:
        yield bucket


@torch.no_grad()
def exchange_rows(
    wanted: Sequence[tuple[int, TensorRows]],
    parts: Mapping[str, Tensor],
    layouts: TensorLayouts,
    parallel: ParallelContext,
    phase: str,
) -> list[Tensor]:
    """Send rows to the ranks that want them. Collective.

    Args:
        wanted: receiving rank and rows; the same on every rank.
        parts: this rank's `local_part` of every tensor that it holds a part of.

    Returns:
        the rows that this rank wants, in order; views if its own part holds them.

    Raises:
        DeadlineError, PeerError: a rank did not take part.
    """
    batch = _BucketExchange(parallel.rank, parts)
    tensors = [
        tensor
        for receiver, rows in wanted
        if (tensor := batch.take(receiver, rows, layouts[rows.name])) is not None
    ]
    parallel.exchange(batch.sends, batch.receives, phase)
    for target, values in batch.scattered:
        target.copy_(values)
    return tensors


class _BucketExchange:
    """The sends and receives of a rank for one bucket of each receiver."""

    def __init__(self, rank: int, parts: Mapping[str, Tensor]) -> None:
        self.sends: list[tuple[Tensor, int]] = []
        self.receives: list[tuple[Tensor, int]] = []
        self.scattered: list[tuple[Tensor, Tensor]] = []
        self._rank = rank
        self._parts = parts
        self._device = next((tensor.device for tensor in parts.values()), torch.device("cpu"))

    def take(self, receiver: int, rows: TensorRows, layout: TensorLayout) -> Tensor | None:
        """Return the rows, complete after the exchange, on their receiver; None on other ranks."""
        part = self._parts.get(rows.name)  # a rank of another stage has none
        pieces = [piece for piece in layout.pieces if _common_rows(piece, rows) is not None]
        is_here = len(pieces) == 1 and receiver in pieces[0].holders
        if receiver != self._rank:
            for piece in pieces if not is_here else ():
                if _source(piece, receiver) == self._rank:
                    assert part is not None
                    local, _ = _positions(piece, rows)
                    self.sends.append((part[local].contiguous(), receiver))
            return None
        if is_here:
            assert part is not None
            return part[_positions(pieces[0], rows)[0]]
        shape = (rows.stop - rows.start, *layout.shape[1:])
        result = torch.empty(shape, dtype=layout.dtype, device=self._device)
        for piece in pieces:
            local, target = _positions(piece, rows)
            if (source := _source(piece, receiver)) == receiver:
                assert part is not None
                result[target].copy_(part[local])
            else:
                self._receive(result[target], source)
        return result

    def _receive(self, target: Tensor, source: int) -> None:
        values = target
        if not target.is_contiguous():
            values = torch.empty_like(target, memory_format=torch.contiguous_format)
            self.scattered.append((target, values))
        self.receives.append((values, source))


def _source(piece: TensorShard, receiver: int) -> int:
    """Return the rank that sends a piece: the receiver itself, or one of the holders in turn."""
    if receiver in piece.holders:
        return receiver
    return piece.holders[receiver % len(piece.holders)]


def _common_rows(piece: TensorShard, rows: TensorRows) -> tuple[int, int] | None:
    start = max(rows.start, piece.offset[0])
    stop = min(rows.stop, piece.offset[0] + piece.shape[0])
    return (start, stop) if start < stop else None


def _positions(piece: TensorShard, rows: TensorRows) -> tuple[slice, tuple[slice, ...]]:
    """Return the positions of the common rows in the piece and in `rows`."""
    start, stop = _common_rows(piece, rows) or (0, 0)
    local = slice(start - piece.offset[0], stop - piece.offset[0])
    offset = (start - rows.start, *piece.offset[1:])
    return local, region(offset, (stop - start, *piece.shape[1:]))
