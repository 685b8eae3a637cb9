"""What happens when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class EventQueue:
    """Actions by time; those of one time in the order they were planned."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self.now = 0.0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do `action` at `when` seconds, not before now."""
        self._num_planned += 1
        heappush(self._events, (max(when, self.now), self._num_planned, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Do `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def step(self) -> bool:
        """Do what comes next; ``False``: nothing does."""
        if not self._events:
            return False
        self.now, _, action = heappop(self._events)
        action()
        return True
