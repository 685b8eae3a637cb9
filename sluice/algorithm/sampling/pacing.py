"""The order of prompts: those that are expected to take long start early in a version's time.

A group started under version v has to end before the batch of v + S is formed, or that batch waits
for it. So what starts late in the time between two announcements should be short. Of the prompts
that are next in line the longest is started that is expected to end in time; if none is, the
shortest. Expected is what the prompt's earlier attempts took, in tokens, times the seconds that
groups have lately taken for each of their mean tokens (their longest sample and the wait for a
slot included).

No prompt waits for long: one that was skipped for two announcements goes first. At S = 0 prompts
keep the order of issue, and a run repeats.

State without I/O; the reward service and the simulator drive the same object, each with its clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

_KEPT_OF_RATE, _KEPT_OF_LENGTH, _KEPT_OF_INTERVAL = 0.98, 0.98, 0.8
KNOWN_LENGTHS = 65_536
"""Prompts whose lengths a forecast remembers."""
_VERSIONS_PASSED_BY = 2
_STEPS_PER_OCTAVE, _LENGTH_STEPS = 8, 240  # up to 2^30 tokens


@dataclass(slots=True)
class _Average:
    """A mean that weighs recent values more; `kept` is the weight of the past."""

    kept: float
    value: float | None = None

    def see(self, value: float) -> None:
        past = value if self.value is None else self.value
        self.value = self.kept * past + (1.0 - self.kept) * value


class FinishForecast:
    """How long groups take, and how much time is left for those that start now.

    Args:
        max_staleness: S >= 0.
    """

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._interval_s = _Average(_KEPT_OF_INTERVAL)
        self._s_per_token = _Average(_KEPT_OF_RATE)
        self._tokens = _Average(_KEPT_OF_LENGTH)
        self._lengths: OrderedDict[str, float] = OrderedDict()
        self._announced_s: float | None = None

    def announced(self, now_s: float) -> None:
        """Note that a version was announced."""
        if self._announced_s is not None:
            self._interval_s.see(now_s - self._announced_s)
        self._announced_s = now_s

    def ended(self, key: str, *, mean_tokens: float, seconds: float) -> None:
        """Note that a group ended: its samples' mean tokens, and the seconds since its start."""
        if mean_tokens <= 0.0:
            return
        self.remember(key, mean_tokens)
        self._s_per_token.see(seconds / mean_tokens)

    def remember(self, key: str, mean_tokens: float) -> None:
        """Remember the mean tokens of a prompt's samples; forget the oldest of too many."""
        self._lengths[key] = mean_tokens
        self._lengths.move_to_end(key)
        if len(self._lengths) > KNOWN_LENGTHS:
            self._lengths.popitem(last=False)
        self._tokens.see(mean_tokens)

    def tokens(self, key: str) -> float:
        """Mean response length to expect of a prompt: as in its last attempt, else as of all."""
        return self._lengths.get(key, self._tokens.value or 0.0)

    def tokens_in_time(self, now_s: float) -> float | None:
        """Mean response length of a group that would just end in time; ``None``: not known yet."""
        interval_s, s_per_token = self._interval_s.value, self._s_per_token.value
        if self._announced_s is None or interval_s is None or not s_per_token:
            return None
        end_s = self._announced_s + self._max_staleness * interval_s
        return (end_s - now_s) / s_per_token


class AdmissionOrder:
    """Prompts next in line, by expected length to an eighth of an octave (9 %).

    All operations take constant time, however long the line is.
    """

    def __init__(self) -> None:
        # Sequences by rounded length, each in the order of the line; bit i: `_alike[i]` has some.
        self._alike = [deque[int]() for _ in range(_LENGTH_STEPS)]
        self._filled = 0
        self._line: OrderedDict[int, tuple[int, int]] = OrderedDict()  # length step, version

    def __len__(self) -> int:
        return len(self._line)

    def add(self, sequence: int, expected_tokens: float, version: int) -> None:
        """Put the prompt `sequence` into the line, from `version` on."""
        step = _length_step(expected_tokens)
        self._alike[step].append(sequence)
        self._filled |= 1 << step
        self._line[sequence] = step, version

    def take(self, version: int, tokens_in_time: float | None) -> int:
        """Return the sequence of the prompt to start now, which leaves the line.

        Args:
            version: announced now.
            tokens_in_time: see `FinishForecast`; ``None``: in their order of arrival.

        Raises:
            IndexError: no prompt is in line.
        """
        if not self._line:
            raise IndexError("no prompt is in line")
        step, since = next(iter(self._line.values()))
        if version < since:  # a trainer went back to an older policy: the wait begins again
            self._line = OrderedDict(
                (s, (at, min(v, version))) for s, (at, v) in self._line.items()
            )
            since = version
        if tokens_in_time is not None and version - since < _VERSIONS_PASSED_BY:
            in_time = self._filled & ((2 << _length_step(tokens_in_time)) - 1)
            shortest = self._filled & -self._filled
            step = (in_time or shortest).bit_length() - 1
        # The first of the line also comes first among equals.
        alike = self._alike[step]
        sequence = alike.popleft()
        if not alike:
            self._filled &= ~(1 << step)
        del self._line[sequence]
        return sequence

    def clear(self) -> None:
        """Remove all prompts from the line."""
        for alike in self._alike:
            alike.clear()
        self._filled = 0
        self._line.clear()


def _length_step(tokens: float) -> int:
    """0 to `_LENGTH_STEPS` - 1."""
    if tokens <= 0.0:
        return 0
    step = int(_STEPS_PER_OCTAVE * math.log2(1.0 + tokens))
    return step if step < _LENGTH_STEPS else _LENGTH_STEPS - 1
