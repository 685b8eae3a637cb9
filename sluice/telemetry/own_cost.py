"""What telling about a run costs this process: CPU of the threads that do it, and spans.

Recording a span takes a few microseconds in whichever thread works, which is too little to be
timed each time; `benchmarks/span_cost.py` measures it. Threads of libraries (gRPC's, for one) do
not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from sluice.telemetry.tally import EventCounts

__all__ = ["SPANS", "TELEMETRY_CPU", "Part", "SpanOutcome"]


class Part(StrEnum):
    """What telemetry does."""

    SPANS = "spans"
    SCRAPES = "scrapes"


class SpanOutcome(StrEnum):
    """What became of a span that was recorded."""

    SENT = "sent"
    DROPPED = "dropped"


class _CpuSeconds:
    """CPU seconds by part; any thread may charge its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(Part, 0.0)

    @contextmanager
    def charged(self, part: Part) -> Iterator[None]:
        """What this thread computes inside counts for `part`. Must not be nested."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            spent_s = time.thread_time() - began_s
            with self._lock:
                self._seconds[part] += spent_s

    def seconds(self) -> Mapping[Part, float]:
        """CPU seconds so far."""
        with self._lock:
            return dict(self._seconds)


TELEMETRY_CPU = _CpuSeconds()
SPANS = EventCounts()
"""By `SpanFate`, for each exporter that a span goes to."""
