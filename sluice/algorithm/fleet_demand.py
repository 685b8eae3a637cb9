"""How many replicas would keep the trainer fed: the number that an autoscaler follows.

What the last batches cost is known: slots in use, added up over time. The trainer took them in the
time that passed, less the time in which it waited for generation; had it never waited, the same
work would have been wanted in the remaining time. So

    slots wanted = HEADROOM * used slot seconds / (observed seconds - starved seconds)

A trainer that never waits, with half of the slots in use, asks for about half of the fleet; one
that waits half of its time, with all slots in use, for twice the fleet. In synchronous mode, where
generation and training take turns, the same formula makes both take equally long.

Values in, values out; `services.reward.demand_meter` measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["HEADROOM", "MOST_GROWTH", "FleetUse", "replicas_needed", "slots_needed"]

HEADROOM = 1.1
"""A fleet that is exactly fast enough makes the trainer wait about every other time."""

MOST_GROWTH = 4.0
"""Times the present fleet that one measurement may ask for: far beyond it nothing is known about
how the work would spread. The next measurement goes on from there."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class FleetUse:
    """What was seen over some batches.

    Attributes:
        observed_s: seconds looked at.
        starved_s: of them, with the trainer waiting for a batch and generation missing.
        slot_seconds: slots in use, added up over them.
    """

    observed_s: float
    starved_s: float
    slot_seconds: float


def slots_needed(use: FleetUse, num_slots: int) -> float:
    """Slots that would keep the trainer fed, from 0 to `MOST_GROWTH` times `num_slots`.

    Args:
        use: of the last batches.
        num_slots: of the fleet now; what is wanted before anything was seen.
    """
    if use.observed_s <= 0.0:
        return float(num_slots)
    most = MOST_GROWTH * num_slots
    fed_s = use.observed_s - use.starved_s
    wanted = HEADROOM * use.slot_seconds
    return most if wanted >= most * fed_s else wanted / fed_s


def replicas_needed(slots: float, *, num_slots: int, num_replicas: int) -> int:
    """Replicas with so many slots, of the size that the present ones have; at least 1.

    Args:
        slots: see `slots_wanted`.
        num_slots, num_replicas: of the fleet now; 0 without one.
    """
    if num_slots <= 0 or num_replicas <= 0:
        return 1
    return max(1, math.ceil(slots * num_replicas / num_slots - _ROUNDING))
