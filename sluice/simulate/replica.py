"""A rollout replica: slots that draw a token a step, in step with each other.

All running sequences advance together, so a replica has one clock that counts tokens per sequence;
a sequence that starts at clock c with n tokens ends at c + n, whatever happens to the step time
meanwhile. Only the next end has to be planned anew when the load changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from sluice.simulate.group import Sample
from sluice.simulate.settings import FleetSettings

_CLOCK_SLACK = 1e-6


class SimulatedReplica:
    """One replica.

    Args:
        settings: slots and step times.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._running: list[tuple[float, int, Sample]] = []  # by the clock at which they end
        self._waiting: deque[Sample] = deque()
        self._num_started = self._num_running = 0
        self._clock = self._updated_s = self._stalled_until_s = 0.0
        self.version = 0
        self.generated_tokens = 0.0
        self.busy_s = 0.0
        self.slot_s = 0.0
        self.plan = 0  # counts changes: an end planned before the last one is void

    def advance(self, now: float) -> None:
        """Let sequences draw tokens until `now`."""
        seconds = now - max(self._updated_s, self._stalled_until_s)
        self._updated_s = now
        if seconds <= 0.0 or not self._num_running:
            return
        sampled = seconds / self._settings.step_s(self._num_running)
        self._clock += sampled
        self.generated_tokens += sampled * self._num_running
        self.busy_s += seconds
        self.slot_s += seconds * self._num_running

    def stall(self, now: float, seconds: float) -> None:
        """Stand still for a while, after any other stall."""
        self.advance(now)
        self._stalled_until_s = max(now, self._stalled_until_s) + seconds

    def swap(self, now: float, version: int, seconds: float) -> None:
        """Take on new weights; running sequences keep their tokens."""
        self.stall(now, seconds)
        self.version = version

    def add(self, samples: Sequence[Sample], now: float) -> None:
        """Take on sequences; those without a slot wait in order."""
        self.advance(now)
        self._waiting.extend(samples)
        self._fill_slots()

    def finished(self, now: float) -> list[Sample]:
        """Sequences that have ended by `now`; others get their slots."""
        self.advance(now)
        ended = []
        while self._running and self._running[0][0] <= self._clock + _CLOCK_SLACK:
            sample = heappop(self._running)[2]
            if not sample.is_over:
                sample.is_over = True
                self._num_running -= 1
                ended.append(sample)
        self._fill_slots()
        return ended

    def abort(self, samples: Sequence[Sample], now: float) -> float:
        """Break sequences off; returns the tokens they had drawn."""
        self.advance(now)
        sampled = 0.0
        for sample in samples:
            if sample.is_over:
                continue
            sample.is_over = True
            if sample.start_clock is not None:
                self._num_running -= 1
                sampled += self._clock - sample.start_clock
        self._fill_slots()
        return sampled

    def sampled(self, samples: Sequence[Sample], now: float) -> float:
        """Tokens that unfinished sequences have drawn by `now`."""
        self.advance(now)
        return sum(
            self._clock - sample.start_clock
            for sample in samples
            if sample.start_clock is not None and not sample.is_over
        )

    def next_end(self, now: float) -> float | None:
        """When a sequence ends if nothing changes, seconds; ``None``: none runs."""
        while self._running and self._running[0][2].is_over:
            heappop(self._running)
        if not self._running:
            return None
        tokens = max(0.0, self._running[0][0] - self._clock)
        begin = max(now, self._stalled_until_s)
        return begin + tokens * self._settings.step_s(self._num_running)

    def _fill_slots(self) -> None:
        while self._waiting and self._num_running < self._settings.slots:
            sample = self._waiting.popleft()
            if sample.is_over:
                continue
            sample.start_clock, sample.oldest_version = self._clock, self.version
            self._num_started += 1
            self._num_running += 1
            end = self._clock + sample.tokens
            heappush(self._running, (end, self._num_started, sample))
