"""Metrics that Prometheus may read, each declared once with its unit, and counters and histograms
of their values. Nothing here needs prometheus_client.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate


class EventCounts:
    """Counts since the process's start. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *labels: str, count: int = 1) -> None:
        """Count events of one kind, named by labels; there must be few kinds in all."""
        with self._lock:
            self._counts[labels] += count

    def counts(self) -> Mapping[tuple[str, ...], int]:
        """Return the events so far, by kind."""
        with self._lock:
            return dict(self._counts)


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
        """Return the number of values."""
        return self.cumulative[-1][1]


class Histogram:
    """Counts of values by size.

    Args:
        bounds: upper bounds of the buckets (inclusive), rising; one without an upper bound is
        added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def distribution(self) -> Distribution:
        """Return what was counted so far."""
        bounds = (*self._bounds, math.inf)
        return Distribution(tuple(zip(bounds, accumulate(self._counts), strict=True)), self._total)


class InstrumentKind(StrEnum):
    """Kinds of metrics. A counter never falls while the thing that it counts lives."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric without its value.

    Attributes:
        name: as it is exported, with its unit; a counter's ends with ``_total``.
        kind: see `InstrumentKind`.
        unit: of one count, in words.
        meaning: one sentence.
        labels: names of its labels, in order.
        bounds: of a histogram's buckets.
        may_restart: the thing that a counter counts may restart while this process lives; then the
            counter falls to what was counted since, which shows the restart to Prometheus.
    """

    name: str
    kind: InstrumentKind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    may_restart: bool = False

    def at(self, value: float | Distribution, *labels: str) -> InstrumentReading:
        """Return a reading of `value` for these values of its labels."""
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name}: {len(labels)} labels given, {self.labels} wanted")
        return InstrumentReading(self, value, labels)

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names that a query can use: a histogram has three."""
        if self.kind is not InstrumentKind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


@dataclass(frozen=True, slots=True)
class InstrumentReading:
    """One value of an instrument."""

    instrument: Instrument
    value: float | Distribution
    labels: tuple[str, ...] = ()


def counter(
    name: str, unit: str, meaning: str, *labels: str, may_restart: bool = False
) -> Instrument:
    """Declare a count since the process's start, or since the start of the thing that it counts."""
    return Instrument(name, InstrumentKind.COUNTER, unit, meaning, labels, may_restart=may_restart)


def gauge(name: str, unit: str, meaning: str, *labels: str) -> Instrument:
    """Declare a value that rises and falls."""
    return Instrument(name, InstrumentKind.GAUGE, unit, meaning, labels)


def histogram(name: str, unit: str, meaning: str, bounds: tuple[float, ...]) -> Instrument:
    """Declare how often values of each size occurred."""
    return Instrument(name, InstrumentKind.HISTOGRAM, unit, meaning, (), bounds)
