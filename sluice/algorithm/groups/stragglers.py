"""Decide which streams and groups are given up, from times that the caller passes.

A *stream* is one replica's answer to one request for samples of a group. It is stalled when it
sends nothing, slow when its samples grow much slower than other replicas' samples; either way its
samples continue elsewhere. A *group* is over when it has used its time or its tokens; unfinished
samples then end with the tokens they have.

Times are seconds of any monotonic clock; rates are tokens a second and running sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass, field

PARTIALS_PER_S = 10_000
"""Most samples whose new tokens a reward service receives per second. Each costs it about 10
microseconds of its one interpreter, and a message of several samples some 200."""

# A rate is the mean of at least so many arrivals of tokens, and over so long.
MIN_ARRIVALS = 4
MIN_OBSERVED_S = 1.0
# Share of the newest rate in a replica's; the rest is its earlier rate.
NEWEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class StragglerRules:
    """When to give up; ``None`` turns a rule off.

    Attributes:
        stall_timeout_s: seconds of silence after which a stream is stalled.
        slow_factor: a stream is slow if it is this many times slower than the median of the other
            replicas.
        group_deadline_s: seconds after its first start at which a group is over.
        group_token_budget: response tokens at which a group is over.
    """

    stall_timeout_s: float | None = None
    slow_factor: float | None = None
    group_deadline_s: float | None = None
    group_token_budget: int | None = None

    @property
    def end_groups(self) -> bool:
        """Whether a group may be over before all of its samples have ended."""
        return self.group_deadline_s is not None or self.group_token_budget is not None

    def stalled_at(self, pace: StreamPace) -> float | None:
        """Return when a stream is stalled, unless it sends something before."""
        return None if self.stall_timeout_s is None else pace.last_progress + self.stall_timeout_s

    def is_stalled(self, pace: StreamPace, read_until: float) -> bool:
        """Return whether the stream was silent for too long. What came by `read_until` has been
        read: a busy service reads late, which does not count as silence."""
        at = self.stalled_at(pace)
        return at is not None and at <= read_until

    def is_slow(self, rate: float | None, median_rate: float | None) -> bool:
        """Return whether a stream of `rate` lags behind other replicas' `median_rate`."""
        if self.slow_factor is None or rate is None or median_rate is None:
            return False
        return rate * self.slow_factor < median_rate

    def over_at(self, first_start: float | None) -> float | None:
        """Return when a group that started at `first_start` has used its time."""
        if self.group_deadline_s is None or first_start is None:
            return None
        return first_start + self.group_deadline_s

    def is_spent(self, num_tokens: int) -> bool:
        """Return whether a group with this many response tokens has used its budget."""
        return self.group_token_budget is not None and num_tokens >= self.group_token_budget


def partial_interval_ms(min_ms: int, num_slots: int, max_ms: float) -> int:
    """Return the interval at which replicas send the tokens of unfinished samples, milliseconds.

    Args:
        min_ms: as configured; enough for `PARTIALS_PER_S` with few slots. 0: tokens are not sent.
        num_slots: slots of the fleet, in which samples may grow at once.
        max_ms: with a longer one a stream that makes progress would count as stalled; less than
            `min_ms` has no effect.
    """
    if not min_ms:
        return 0
    in_proportion = min(math.ceil(1000 * num_slots / PARTIALS_PER_S), math.floor(max_ms))
    return max(min_ms, in_proportion)


@dataclass(slots=True)
class StreamPace:
    """The progress of one stream.

    Attributes:
        waiting: samples without a token from this stream; they may be waiting for a slot.
        running: unfinished samples with tokens from it, and when their newest one came.
        last_progress: time of the last sign of progress of these samples.
        num_tokens: tokens received.
    """

    waiting: set[int]
    last_progress: float
    running: dict[int, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_finished: int = 0
    _accepted: float | None = None
    _engine_tokens: int | None = None
    _num_arrivals: int = 0
    _grown_tokens: int = 0  # of running samples, since their first tokens came
    _grown_s: float = 0.0  # sample-seconds that these took
    _longest_gap_s: float = 0.0  # between tokens of one sample: replicas report at intervals
    _whole_tokens: int = 0  # of finished samples
    _whole_s: float = 0.0  # from acceptance, so that waiting for a slot counts as well

    def note_accepted(self, now_s: float) -> None:
        """Note that the replica has accepted the request."""
        self._accepted = self.last_progress = now_s

    def note_engine_tokens(self, engine_tokens: int, now_s: float) -> None:
        """Note how many tokens the replica has sampled, for all its callers.

        More than before are a sign of life for samples that may wait for a slot. Samples that have
        one get tokens of their own.
        """
        if self.waiting and engine_tokens != self._engine_tokens:
            self.last_progress = now_s
        self._engine_tokens = engine_tokens

    def note_tokens(
        self, new_tokens: dict[int, int], finished: Collection[int], now_s: float
    ) -> None:
        """Note new tokens by sample index; samples in `finished` are complete."""
        has_grown = False
        for index, count in new_tokens.items():
            if not count:
                continue
            self.num_tokens += count
            self.waiting.discard(index)
            if (newest := self.running.get(index)) is not None:
                has_grown = True
                self._grown_tokens += count
                self._grown_s += now_s - newest
                self._longest_gap_s = max(self._longest_gap_s, now_s - newest)
            self.running[index] = now_s
        self._num_arrivals += has_grown
        for index in finished:
            self.waiting.discard(index)
            self.running.pop(index, None)
            if self._accepted is not None:
                self._whole_tokens += new_tokens.get(index, 0)
                self._whole_s += now_s - self._accepted
        self.num_finished += len(finished)
        self.last_progress = now_s

    def quietest(self, now_s: float) -> tuple[int, float] | None:
        """Return the running sample that has had no new token for longest, and for how long."""
        if not self.running:
            return None
        index = min(self.running, key=self.running.__getitem__)
        return index, now_s - self.running[index]

    def rate(self, now_s: float) -> float | None:
        """Return tokens a second and running sample since its first tokens; ``None``: too early.

        A finished sample comes at once, the tokens of the others with the next report. So the time
        since a sample's newest token counts only beyond the longest such time before.
        """
        if self._num_arrivals < MIN_ARRIVALS:
            return None
        silent_s = (now_s - newest - self._longest_gap_s for newest in self.running.values())
        seconds = self._grown_s + sum(max(0.0, seconds_silent) for seconds_silent in silent_s)
        return self._grown_tokens / seconds if seconds >= MIN_OBSERVED_S else None

    def min_rate(self) -> float | None:
        """Return a lower bound of the rate of finished samples; ``None``: none has finished."""
        return self._whole_tokens / self._whole_s if self._whole_s > 0 else None


class RateTable:
    """The latest rate of each replica, smoothed."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._sorted: list[float] = []

    def note(self, replica: str, rate: float) -> None:
        """Note that a stream of `replica` ran at `rate`."""
        previous_rate = self._rates.get(replica)
        if previous_rate is not None:
            del self._sorted[bisect_left(self._sorted, previous_rate)]
            rate = NEWEST_SHARE * rate + (1 - NEWEST_SHARE) * previous_rate
        self._rates[replica] = rate
        insort(self._sorted, rate)

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all other replicas."""
        self._rates = {name: rate for name, rate in self._rates.items() if name in replicas}
        self._sorted = sorted(self._rates.values())

    def median_of_others(self, replica: str) -> float | None:
        """Return the median rate of all replicas but this one; ``None``: no other rate is known.

        Its own rate is left out since in a small fleet it would pull the median to itself.
        """
        own_rate = self._rates.get(replica)
        left_out = len(self._sorted) if own_rate is None else bisect_left(self._sorted, own_rate)
        count = len(self._sorted) - (own_rate is not None)
        if count == 0:
            return None

        def at(index: int) -> float:  # of the sorted rates without its own; no copy at every token
            return self._sorted[index + (index >= left_out)]

        return (at((count - 1) // 2) + at(count // 2)) / 2
