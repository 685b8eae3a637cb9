"""Values for Prometheus: readings of exported metrics, counts of events and histograms; among them
the cost of this process's own telemetry.

Nothing here needs prometheus_client.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from sluice.telemetry.metric_names import Instrument, instrument


class EventCounts:
    """Counts since the process's start. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def add(self, *labels: str, count: float = 1) -> None:
        """Count events of one kind, named by labels; there must be few kinds in all."""
        with self._lock:
            self._counts[labels] += count

    def counts(self) -> Mapping[tuple[str, ...], float]:
        """Return the events so far, by kind."""
        with self._lock:
            return dict(self._counts)


class Distribution(NamedTuple):
    """A histogram at one moment.

    Attributes:
        cumulative: pairs of an upper bound (inclusive) and how many values are at most that; the
            last bound is infinite.
        total: sum of all values.
    """

    cumulative: tuple[tuple[float, int], ...]
    total: float


class InstrumentReading(NamedTuple):
    """One value of an exported metric."""

    instrument: Instrument
    value: float | Distribution
    labels: tuple[str, ...] = ()


def reading(name: str, value: float | Distribution, *labels: str) -> InstrumentReading:
    """Return a value of the metric `name` of the table, for these values of its labels.

    Raises:
        LookupError: the metric has no row.
        ValueError: it has another number of labels.
    """
    exported = instrument(name)
    if len(labels) != len(exported.labels):
        raise ValueError(f"{name}: {len(labels)} labels given, {exported.labels} wanted")
    return InstrumentReading(exported, value, labels)


class Histogram:
    """Counts of values by size.

    Args:
        name: of a metric with bounds in the table. The bounds of buckets are inclusive; a bucket
            without an upper bound is added.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bounds = instrument(name).bounds
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def reading(self) -> InstrumentReading:
        """Return the counts so far."""
        bounds = (*self._bounds, math.inf)
        cumulative = tuple(zip(bounds, accumulate(self._counts), strict=True))
        return reading(self._name, Distribution(cumulative, self._total))


SPANS = EventCounts()
"""Recorded spans by `SpanOutcome`, counted for each destination."""
TELEMETRY_CPU = EventCounts()
"""CPU seconds by `TelemetryPart`.

Threads of libraries, such as gRPC's, do not count; nor does recording a span, which is too short to
be timed each time: `benchmarks/telemetry/span_cost.py` measures it.
"""


class TelemetryPart(StrEnum):
    """The work of telemetry."""

    SPANS = "spans"
    SCRAPES = "scrapes"


class SpanOutcome(StrEnum):
    """The outcome of a recorded span."""

    SENT = "sent"
    DROPPED = "dropped"


@contextmanager
def charged_cpu(part: TelemetryPart) -> Iterator[None]:
    """Charge the CPU time of this thread inside the block to `part`. Do not nest blocks."""
    began_s = time.thread_time()
    try:
        yield
    finally:
        TELEMETRY_CPU.add(part, count=time.thread_time() - began_s)
