"""Shares of the weights: the part of each tensor that one worker of a replica takes.

A part of a tensor is what its cuts select, packed: [3, 8] with the ranges (0, 1) and (4, 2) of
dimension 1 becomes [3, 3]. Parts are sent and held in packed form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sluice.errors import InvalidRequestError
from sluice.types import TensorSpec
from sluice.weight_share import Cut, WeightShare

if TYPE_CHECKING:
    from torch import Tensor

Cuts = tuple[Cut, ...]
Ranges = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]

MAX_RANGES = 1024
"""Most ranges of a cut, and most blocks of a part; more would be slow to pack."""


def cuts_by_name(share: WeightShare) -> dict[str, Cuts]:
    """Return the cuts of each tensor that is not taken whole."""
    return dict(share.cuts)


def check_share(share: WeightShare, tensors: Sequence[TensorSpec], owner: str) -> None:
    """Raise InvalidRequestError unless these are cuts of these tensors.

    Args:
        owner: names the worker in errors.
    """
    shapes = {spec.name: spec.shape for spec in tensors}
    names = [name for name, _ in share.cuts]
    for previous, name in itertools.pairwise(names):
        if previous >= name:
            detail = f"{name} follows {previous}; send rising names, once"
            raise InvalidRequestError(f"{owner}: {detail}")
    for name, cuts in share.cuts:
        if name not in shapes:
            raise InvalidRequestError(
                f"{owner}: {name[:200]} is none of the weights; give trainer and replicas the same "
                "model"
            )
        try:
            _check_cuts(cuts, shapes[name])
        except ValueError as error:
            raise InvalidRequestError(f"{owner}: {name}: {error}") from error


def _check_cuts(cuts: Cuts, shape: Sequence[int]) -> None:
    dimensions = [cut.dimension for cut in cuts]
    if not cuts or dimensions != sorted({*dimensions}) or not 0 <= dimensions[-1] < len(shape):
        raise ValueError(f"cuts of dimensions {dimensions[:8]}; send rising ones of {len(shape)}")
    for cut in cuts:
        size, end = shape[cut.dimension], -1
        if not 0 < len(cut.ranges) <= MAX_RANGES:
            raise ValueError(
                f"{len(cut.ranges)} ranges of dimension {cut.dimension}; send 1 to {MAX_RANGES}"
            )
        for start, length in cut.ranges:
            if not (end < start and length > 0 and start + length <= size):
                raise ValueError(
                    f"the range of {length} from {start} in dimension {cut.dimension} of {size}; "
                    "send rising ranges apart from each other, within it"
                )
            end = start + length
    if num_blocks(cuts) > MAX_RANGES:
        raise ValueError(
            f"{num_blocks(cuts)} blocks, the product of the ranges of its cuts; send cuts of at "
            f"most {MAX_RANGES}"
        )


def num_blocks(cuts: Cuts) -> int:
    """Return the number of blocks of the tensor that a part consists of."""
    return math.prod(len(cut.ranges) for cut in cuts)


def part_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Return the shape of the packed part."""
    shape_of_part = list(shape)
    for cut in cuts:
        shape_of_part[cut.dimension] = sum(length for _, length in cut.ranges)
    return tuple(shape_of_part)


def part_name(name: str, cuts: Cuts) -> str:
    """Return the name of a part, which includes its place; of a whole tensor, the tensor's.

    For example ``wte.weight[1:0+4,8+4]``: two ranges of 4 of dimension 1, from 0 and from 8.
    """
    if not cuts:
        return name
    places = (
        f"{cut.dimension}:" + ",".join(f"{start}+{length}" for start, length in cut.ranges)
        for cut in cuts
    )
    return f"{name}[{';'.join(places)}]"


def common_cuts(shape: Sequence[int], cuts: Cuts, other_cuts: Cuts) -> Cuts | None:
    """Return the intersection of two parts of a tensor; ``None`` if it is empty."""
    ranges = {cut.dimension: cut.ranges for cut in cuts}
    for cut in other_cuts:
        range_here = ranges.get(cut.dimension, ((0, shape[cut.dimension]),))
        ranges[cut.dimension] = _common_ranges(range_here, cut.ranges)
    if not all(ranges.values()):
        return None
    # A dimension that is taken whole has no cut, so that a part has one name.
    return tuple(
        Cut(dimension, shared)
        for dimension, shared in sorted(ranges.items())
        if shared != ((0, shape[dimension]),)
    )


def _common_ranges(ranges: Ranges, other_ranges: Ranges) -> Ranges:
    pairs = ((max(a, b), min(a + n, b + m)) for a, n in ranges for b, m in other_ranges)
    return tuple((start, stop - start) for start, stop in pairs if start < stop)


def overlapping_ranks(parts: Sequence[tuple[int, Cuts]], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of two overlapping parts of a tensor; empty if no parts overlap.

    Args:
        parts: each with the rank that holds it.
    """
    ranges_of = [{cut.dimension: cut.ranges for cut in cuts} for _, cuts in parts]
    # In order of the dimension that most parts differ in, and range by range, so that few are
    # compared: there may be hundreds of ranks.
    dimension = max(
        range(len(shape)),
        key=lambda axis: len({ranges.get(axis) for ranges in ranges_of}),
        default=0,
    )
    intervals = [
        (start, start + length, number)
        for number, ranges in enumerate(ranges_of)
        for start, length in ranges.get(dimension, ((0, shape[dimension] if shape else 1),))
    ]
    open_intervals: list[tuple[int, int]] = []
    for start, stop, number in sorted(intervals):
        open_intervals = [interval for interval in open_intervals if interval[0] > start]
        rank, cuts = parts[number]
        for _, earlier in open_intervals:
            other_rank, others_cuts = parts[earlier]
            if common_cuts(shape, cuts, others_cuts) is not None:
                return other_rank, rank
        open_intervals.append((stop, number))
    return ()


def cuts_within(shape: Sequence[int], cuts: Cuts, outer: Cuts) -> Cuts:
    """Return the cuts of a packed part that select a smaller part of the same tensor.

    Args:
        cuts: the cuts of the smaller part.
        outer: the cuts of the part that contains it.
    """
    inner, around = ({c.dimension: c.ranges for c in cut_list} for cut_list in (cuts, outer))
    selected = []
    for dimension in sorted({*inner, *around}):
        all_of_dimension: Ranges = ((0, shape[dimension]),)
        outer_ranges = around.get(dimension, all_of_dimension)
        ranges = _packed_ranges(inner.get(dimension, all_of_dimension), outer_ranges)
        if ranges != ((0, sum(length for _, length in outer_ranges)),):
            selected.append(Cut(dimension, ranges))
    return tuple(selected)


def _packed_ranges(ranges: Ranges, outer_ranges: Ranges) -> Ranges:
    joined: list[tuple[int, int]] = []
    packed = 0
    for outer_start, size in outer_ranges:
        for start, length in ranges:
            if outer_start <= start < outer_start + size:
                place = packed + start - outer_start
                if joined and sum(joined[-1]) == place:  # neighbors only in the packed form
                    start_before, length_before = joined.pop()
                    place, length = start_before, length_before + length
                joined.append((place, length))
        packed += size
    return tuple(joined)


def pack(tensor: Tensor, cuts: Cuts) -> Tensor:
    """Return a part of a tensor, packed; a view of it if that is possible."""
    if all(len(cut.ranges) == 1 for cut in cuts):
        for cut in cuts:
            tensor = tensor.narrow(cut.dimension, *cut.ranges[0])
        return tensor
    part = tensor.new_empty(part_shape(tensor.shape, cuts))
    for source, target in block_slices(tensor.shape, cuts):
        part[target].copy_(tensor[source])
    return part


def is_one_block(shape: Sequence[int], cuts: Cuts) -> bool:
    """Return whether a part is contiguous in its tensor's memory."""
    if num_blocks(cuts) > 1:
        return False
    part = part_shape(shape, cuts)
    sizes = [(size, full) for size, full in zip(part, shape, strict=True) if full != 1]
    cut = [number for number, (size, full) in enumerate(sizes) if size != full]
    return not cut or all(size == 1 for size, _ in sizes[: cut[-1]])


def unpack(part: Tensor, cuts: Cuts, tensor: Tensor) -> None:
    """Write a packed part to its place in the whole tensor."""
    for target, source in block_slices(tensor.shape, cuts):
        tensor[target].copy_(part[source])


def block_slices(shape: Sequence[int], cuts: Cuts) -> Iterator[tuple[Slices, Slices]]:
    """Yield slices of the whole tensor and of the packed part, block by block."""
    of_dimension: Mapping[int, Cut] = {cut.dimension: cut for cut in cuts}
    sides = []
    for dimension, size in enumerate(shape):
        cut = of_dimension.get(dimension)
        sides.append([*_ranges(cut.ranges if cut else ((0, size),))])
    for block in itertools.product(*sides):
        yield tuple(in_tensor for in_tensor, _ in block), tuple(in_part for _, in_part in block)


def _ranges(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    packed = 0
    for start, length in ranges:
        yield slice(start, start + length), slice(packed, packed + length)
        packed += length
