"""Prompts in the order of issue: those that were broken off first, then the data set."""

from __future__ import annotations

from heapq import heappop, heappush

from sluice.simulate.group import SimulatedGroup


class PromptFeed:
    """Positions of the data set, and groups that wait to begin again."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, SimulatedGroup]] = []
        self._next_position = 0

    def put(self, group: SimulatedGroup) -> None:
        """A group begins again before any later one."""
        heappush(self._waiting, (group.position, group))

    def waiting(self) -> SimulatedGroup | None:
        """The first group that waits to begin again."""
        return heappop(self._waiting)[1] if self._waiting else None

    def next_position(self) -> int:
        """The next position of the data set."""
        self._next_position += 1
        return self._next_position - 1
