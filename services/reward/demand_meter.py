"""Measures what the last batches cost the fleet, for `sluice.algorithm.fleet_demand`.

It looks once a second, and only where metrics are on. What a look finds is taken to have held since
the look before.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sluice.algorithm.fleet_demand import FleetUse, replicas_needed, slots_needed

__all__ = ["DemandMeter", "FleetFacts"]

_INTERVAL_S = 1.0
_BATCHES, _LEAST_S = 4, 60.0


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """The loop at one moment, as far as demand depends on it.

    Attributes:
        num_batches: batches that were formed so far.
        is_starved: whether the trainer waits for a batch and generation is what is missing.
        slots_in_use: slots of the fleet with a sequence.
        num_slots: all of them.
        num_replicas: announced replicas.
    """

    num_batches: int
    is_starved: bool
    slots_in_use: int
    num_slots: int
    num_replicas: int


@dataclass(frozen=True, slots=True)
class _Mark:
    at_s: float
    slot_seconds: float
    starved_s: float


class DemandMeter:
    """Looks at the loop and remembers the last batches: `_BATCHES`, or `_LEAST_S` seconds of them.

    Args:
        facts: the loop now; must not block.
    """

    def __init__(self, facts: Callable[[], FleetFacts]) -> None:
        self._facts = facts
        self._latest: tuple[float, FleetFacts] | None = None
        self._marks: deque[_Mark] = deque()
        self._num_batches = 0
        self.slot_seconds = self.starved_s = 0.0

    def look(self, now_s: float) -> None:
        """Takes the loop in at `now_s`, on a clock that rises."""
        facts = self._facts()
        if self._latest is not None:
            before_s, before = self._latest
            self.slot_seconds += before.slots_in_use * (now_s - before_s)
            self.starved_s += (now_s - before_s) * before.is_starved
        self._latest = (now_s, facts)
        if facts.num_batches != self._num_batches:
            self._num_batches = facts.num_batches
            self._marks.append(_Mark(now_s, self.slot_seconds, self.starved_s))
        while len(self._marks) > _BATCHES and now_s - self._marks[1].at_s >= _LEAST_S:
            self._marks.popleft()

    @property
    def slots(self) -> float | None:
        """Slots wanted; ``None`` before a batch was formed, since nothing is known."""
        if self._latest is None or not self._marks:
            return None
        now_s, facts = self._latest
        first = self._marks[0]
        use = FleetUse(
            now_s - first.at_s,
            self.starved_s - first.starved_s,
            self.slot_seconds - first.slot_seconds,
        )
        return slots_needed(use, facts.num_slots)

    @property
    def replicas(self) -> int | None:
        """The same in replicas of the present size."""
        slots = self.slots
        if slots is None or self._latest is None:
            return None
        _, facts = self._latest
        return replicas_needed(slots, num_slots=facts.num_slots, num_replicas=facts.num_replicas)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Looks at intervals while the block runs, in the running event loop."""
        loop = asyncio.get_running_loop()
        upcoming: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal upcoming
            upcoming = loop.call_later(_INTERVAL_S, look)
            self.look(time.monotonic())

        look()
        try:
            yield
        finally:
            if upcoming is not None:
                upcoming.cancel()
