"""Karmarkar-Karp largest differencing: split weights into k parts of nearly equal sum.

The choice of ties follows verl's `balance_batch`, so that a run compared with verl gives each rank
the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from sluice.errors import ConfigError

Partition = tuple[tuple[int, ...], ...]

LINEAR_WORKLOAD = 24_576
"""Cost of the layers that are linear in length against attention, from verl. Per layer the two are
about ``24 h^2 L`` and ``4 h L^2`` operations, a ratio of ``6 h``; 4096 is the h of a 7B model."""


def workload(num_tokens: int) -> int:
    """Cost of a sequence in arbitrary units: ``24576 * L + L**2``."""
    return LINEAR_WORKLOAD * num_tokens + num_tokens * num_tokens


class _Slot(NamedTuple):
    """One part under construction. Ordered by weight, then by number of items, then by items."""

    weight: int
    num_items: int
    items: tuple[int, ...]


class _State(NamedTuple):
    """k parts, heaviest first; the heap pops the one with the largest spread."""

    negative_spread: int
    negative_heaviest: int
    order: int
    slots: tuple[_Slot, ...]


def balanced_partition(weights: Sequence[int], num_parts: int, *, equal_size: bool) -> Partition:
    """Split ``range(len(weights))`` into `num_parts` parts of nearly equal weight.

    Args:
        weights: cost of each item, >= 0.
        num_parts: k >= 1.
        equal_size: every part gets the same number of items.

    Returns:
        k tuples of ascending indices, the heaviest part first; parts may be empty unless
        `equal_size`.

    Raises:
        ConfigError: k < 1, or `equal_size` and the items do not divide evenly.
    """
    if num_parts < 1 or (equal_size and len(weights) % num_parts):
        raise ConfigError(
            f"cannot split {len(weights)} items into {num_parts} "
            f"{'equally large ' if equal_size else ''}parts; choose a divisor"
        )
    items = sorted(range(len(weights)), key=lambda index: (weights[index], index))
    chunk = num_parts if equal_size else 1
    heap = [
        _state([_Slot(weights[i], 1, (i,)) for i in items[start : start + chunk]], num_parts, start)
        for start in range(0, len(items), chunk)
    ]
    if not heap:
        return ((),) * num_parts
    heapify(heap)
    order = len(items)
    while len(heap) > 1:
        heappush(heap, _merge(heappop(heap), heappop(heap), order))
        order += 1
    return tuple(tuple(sorted(slot.items)) for slot in heap[0].slots)


def _state(filled: Sequence[_Slot], num_parts: int, order: int) -> _State:
    empty = [_Slot(0, 0, ())] * (num_parts - len(filled))
    slots = tuple(sorted([*filled, *empty], reverse=True))
    return _State(slots[-1].weight - slots[0].weight, -slots[0].weight, order, slots)


def _merge(left: _State, right: _State, order: int) -> _State:
    """Pair the heaviest slot of one with the lightest of the other."""
    pairs = zip(left.slots, reversed(right.slots), strict=True)
    merged = [
        _Slot(a.weight + b.weight, a.num_items + b.num_items, a.items + b.items) for a, b in pairs
    ]
    return _state(merged, len(merged), order)
