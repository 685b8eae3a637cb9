"""Find where each rank's part of a tensor lies in the whole tensor, and exchange this between
ranks.

Layouts are read from the DTensor, for any mesh. A scalar counts as one row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from services.trainer.learner.ranks import ParallelContext
from sluice.errors import ConfigError
from sluice.weight_share import Cut
from sluice.weights.share import Cuts, overlapping_ranks

Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A part of a tensor, and the ranks that hold it, ascending."""

    offset: Sizes
    shape: Sizes
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor and its pieces. No piece is empty unless the tensor is.

    `shape` has at least one dimension; with `is_scalar` the tensor has none.
    """

    shape: Sizes
    dtype: torch.dtype
    pieces: tuple[TensorShard, ...]
    is_scalar: bool = False

    @property
    def own_shape(self) -> Sizes:
        """Return the tensor's shape."""
        return () if self.is_scalar else self.shape

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row: of an element of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cuts(self, piece: TensorShard) -> Cuts:
        """Return the cuts that make a piece."""
        sides = zip(piece.offset, piece.shape, self.shape, strict=True)
        return tuple(
            Cut(dimension, ((offset, size),))
            for dimension, (offset, size, length) in enumerate(sides)
            if size != length
        )


TensorLayouts: TypeAlias = Mapping[str, TensorLayout]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part, at least one-dimensional, without a copy."""
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    return part.reshape(at_least_1d(part.shape))


def local_region(tensor: Tensor) -> tuple[Sizes, Sizes]:
    """Return the offset and the shape of this rank's part of a tensor, whole or sharded."""
    if not isinstance(tensor, DTensor):
        shape = at_least_1d(tensor.shape)
        return (0,) * len(shape), shape
    mesh, part = tensor.device_mesh, list(tensor.shape)
    offset, own_index = [0] * len(part), mesh.get_coordinate()
    assert own_index is not None, "a rank has no part of a tensor on others' mesh"
    # FSDP cuts the part of a tensor rank, although FSDP's mesh dimension comes first.
    # Torch's own formula assumes that all parts are equal.
    cuts = zip(tensor.placements, mesh.shape, own_index, strict=True)
    for placement, size, index in sorted(cuts, key=lambda cut: isinstance(cut[0], _StridedShard)):
        if isinstance(placement, Shard | _StridedShard):
            length = part[placement.dim]
            start = min(-(-length // size) * index, length)
            part[placement.dim] = min(-(-length // size), length - start)
            offset[placement.dim] += start
    return tuple(offset), tuple(part)


def at_least_1d(shape: Sequence[int]) -> Sizes:
    """Return a shape in which a scalar is one row."""
    return tuple(shape) or (1,)


def region(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a part in a whole tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def exchange_layouts(
    tensors: Mapping[str, Tensor],
    parallel: ParallelContext,
    outline: Mapping[str, Tensor] | None = None,
) -> TensorLayouts:
    """Exchange the parts that each rank holds. Collective.

    Args:
        tensors: the tensors that this rank has a part of.
        outline: the tensors of all ranks, without memory, the same names in the same order on every
            rank; by default `tensors`.

    Raises:
        ConfigError: the parts of a tensor do not add up to it.
    """
    phase = "exchanging the places of weights"
    devices = {local_part(tensor).device for tensor in tensors.values()}
    for device in sorted(devices, key=str):
        # NCCL connects a group only in a collective of all its ranks; sends are not collective.
        parallel.all_reduce_sum([torch.zeros(1, device=device)], phase)
    all_tensors = tensors if outline is None else outline
    parts = [_region_or_empty(name, tensors, all_tensors) for name in all_tensors]
    sent = [float(n) for offset_and_shape in parts for part in offset_and_shape for n in part]
    gathered = parallel.all_gather(sent, phase)
    layouts: dict[str, TensorLayout] = {}
    start = 0
    for name, tensor in all_tensors.items():
        shape = at_least_1d(tensor.shape)
        middle, start = start + len(shape), start + 2 * len(shape)
        if not tensor.numel():
            layouts[name] = replicated_layout(tensor, parallel.world_size)
            continue
        holders: dict[tuple[Sizes, Sizes], list[int]] = {}
        for rank, numbers in enumerate(gathered):
            offset, size = (
                _to_sizes(numbers[middle - len(shape) : middle]),
                _to_sizes(numbers[middle:start]),
            )
            if math.prod(size):
                holders.setdefault((offset, size), []).append(rank)
        pieces = tuple(TensorShard(o, s, tuple(ranks)) for (o, s), ranks in sorted(holders.items()))
        layout = TensorLayout(shape, tensor.dtype, pieces, is_scalar=not tensor.ndim)
        cuts = [(piece.holders[0], layout.cuts(piece)) for piece in pieces]
        num_elements = sum(math.prod(piece.shape) for piece in pieces)
        if num_elements != math.prod(shape) or overlapping_ranks(cuts, shape):
            raise ConfigError(
                f"{name}: the ranks' parts {[(p.offset, p.shape) for p in pieces]} do not make "
                f"its shape {shape}; choose another layout of trainer ranks"
            )
        layouts[name] = layout
    return layouts


def _region_or_empty(
    name: str, tensors: Mapping[str, Tensor], outline: Mapping[str, Tensor]
) -> tuple[Sizes, Sizes]:
    """Return `local_region` of a tensor, or an empty part if this rank lacks it."""
    if name in tensors:
        return local_region(tensors[name])
    nothing = (0,) * len(at_least_1d(outline[name].shape))
    return nothing, nothing


def _to_sizes(numbers: Sequence[float]) -> Sizes:
    return tuple(map(int, numbers))


def holds_all(layouts: TensorLayouts, rank: int) -> bool:
    """Return whether a rank holds every piece of every tensor."""
    return all(rank in piece.holders for layout in layouts.values() for piece in layout.pieces)


def replicated_layout(tensor: Tensor, world_size: int) -> TensorLayout:
    """Return the entry for a tensor that every rank holds whole."""
    shape = at_least_1d(tensor.shape)
    shard = TensorShard((0,) * len(shape), shape, tuple(range(world_size)))
    return TensorLayout(shape, tensor.dtype, (shard,), is_scalar=not tensor.ndim)


def moment_layout(layout: TensorLayout, moment: Tensor) -> TensorLayout:
    """Return the layouts of an optimizer's state tensor of a parameter.

    It has the parameter's shape, or is a number on each rank that has a part of it.
    """
    if moment.ndim:
        return replace(layout, dtype=moment.dtype)
    holders = sorted({rank for piece in layout.pieces for rank in piece.holders})
    return TensorLayout(
        (1,), moment.dtype, (TensorShard((0,), (1,), tuple(holders)),), is_scalar=True
    )
