"""Prompts in the order of issue: those that were broken off first, then the data set, paced."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from sluice.algorithm.sampling.pacing import AdmissionOrder, FinishForecast
from sluice.simulate.group import SimulatedGroup


class PromptFeed:
    """Positions of the data set, and groups that wait to begin again.

    Args:
        num_in_line: positions that are weighed against each other, see `pacing`; 1: none.
        key: names the prompt at a position.
        forecast: how long groups take.
    """

    def __init__(
        self, num_in_line: int, key: Callable[[int], str], forecast: FinishForecast
    ) -> None:
        self._num_in_line, self._key, self._forecast = num_in_line, key, forecast
        self._waiting: list[tuple[int, SimulatedGroup]] = []
        self._order = AdmissionOrder()
        self._next_position = 0

    def put(self, group: SimulatedGroup) -> None:
        """A group begins again before any later one."""
        heappush(self._waiting, (group.position, group))

    def waiting(self) -> SimulatedGroup | None:
        """The first group that waits to begin again."""
        return heappop(self._waiting)[1] if self._waiting else None

    def next_position(self, version: int, now_s: float) -> int:
        """The next position of the data set to start under `version`."""
        while len(self._order) < self._num_in_line:
            expected = self._forecast.tokens(self._key(self._next_position))
            self._order.add(self._next_position, expected, version)
            self._next_position += 1
        return self._order.take(version, self._forecast.tokens_in_time(now_s))
