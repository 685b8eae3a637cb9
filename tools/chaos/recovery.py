"""How long throughput stays down after a fault, and the longest time without a step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

FULL_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Yield:
    """Response tokens of something that ended: when it was seen, and how many."""

    at_s: float
    tokens: float


def tokens_per_s(yields: Sequence[Yield], from_s: float, to_s: float) -> float:
    """Return tokens a second of what ended in ``[from_s, to_s)``."""
    times = [each.at_s for each in yields]
    within = yields[bisect_left(times, from_s) : bisect_left(times, to_s)]
    return math.fsum(each.tokens for each in within) / (to_s - from_s)


def recovery_s(
    yields: Sequence[Yield], fault_s: float, *, full_rate: float, window_s: float, end_s: float
) -> float | None:
    """Return the seconds from a fault to the first window of full throughput.

    0: nothing was lost. Faults that come meanwhile are not taken out, so that it is an upper
    bound. ``None``: no such window was seen before `end_s`.

    Args:
        yields: in order of time.
        fault_s: when it began.
        full_rate: tokens a second before all faults; 95 % of it is full throughput.
        window_s: length of a window.
        end_s: when watching ended.
    """
    starts = [fault_s, *(each.at_s for each in yields if each.at_s > fault_s)]
    for start_s in starts:
        if start_s + window_s > end_s:
            return None
        if tokens_per_s(yields, start_s, start_s + window_s) >= FULL_SHARE * full_rate:
            return start_s - fault_s
    return None


def longest_pause_s(steps_s: Sequence[float], from_s: float, end_s: float) -> float:
    """Return the longest time without the end of a step."""
    inside = [at_s for at_s in steps_s if from_s < at_s < end_s]
    times = [from_s, *inside, end_s]
    return max(later - earlier for earlier, later in pairwise(times))


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile; ``None`` of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
