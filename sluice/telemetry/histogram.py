"""How often values of each size came, in buckets: what a histogram is made of."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Distribution", "Histogram"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram at one moment.

    Attributes:
        cumulative: pairs of an upper bound (inclusive) and how many values are at most that; the
            last bound is infinite.
        total: sum of all values.
    """

    cumulative: tuple[tuple[float, int], ...]
    total: float

    @property
    def count(self) -> int:
        """How many values came."""
        return self.cumulative[-1][1]


class Histogram:
    """Counts values by size, since its start.

    Args:
        bounds: upper bounds of the buckets (inclusive), rising; one without end is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """A value came, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def distribution(self) -> Distribution:
        """What came so far."""
        bounds = (*self._bounds, math.inf)
        return Distribution(tuple(zip(bounds, accumulate(self._counts), strict=True)), self._total)
