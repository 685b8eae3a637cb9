"""Karmarkar-Karp largest differencing: split weights into k parts of nearly equal sum.

Ties are broken as in verl (`verl/utils/seqlen_balancing.py`), so that equal weights are split into
the same parts.
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
    """Return the cost of a sequence in arbitrary units: ``24576 * L + L**2``."""
    return LINEAR_WORKLOAD * num_tokens + num_tokens * num_tokens


class _Slot(NamedTuple):
    """One part under construction. Ordered by weight, then by number of items, then by items."""

    weight: int
    num_items: int
    items: tuple[int, ...]


class _State(NamedTuple):
    """k parts, heaviest first.

    The heap pops the least of them: the one with the largest spread, then with the greatest
    heaviest slot. No two states share an item, so that the slots themselves are never compared.
    """

    negative_spread: int
    negative_heaviest: _Slot
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
        _state([_Slot(weights[i], 1, (i,)) for i in items[start : start + chunk]], num_parts)
        for start in range(0, len(items), chunk)
    ]
    if not heap:
        return ((),) * num_parts
    heapify(heap)
    while len(heap) > 1:
        heappush(heap, _merge(heappop(heap), heappop(heap)))
    return tuple(tuple(sorted(slot.items)) for slot in heap[0].slots)


def _state(filled: Sequence[_Slot], num_parts: int) -> _State:
    empty = [_Slot(0, 0, ())] * (num_parts - len(filled))
    slots = tuple(sorted([*filled, *empty], reverse=True))
    heaviest = slots[0]
    # Negating each number turns the order round: items are compared only where there are as many.
    negative = _Slot(-heaviest.weight, -heaviest.num_items, tuple(-i for i in heaviest.items))
    return _State(slots[-1].weight - heaviest.weight, negative, slots)


def _merge(left: _State, right: _State) -> _State:
    """Pair the heaviest slot of one with the lightest of the other."""
    pairs = zip(left.slots, reversed(right.slots), strict=True)
    merged = [
        _Slot(a.weight + b.weight, a.num_items + b.num_items, a.items + b.items) for a, b in pairs
    ]
    return _state(merged, len(merged))
