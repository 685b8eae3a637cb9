"""Measurements of this process: its age, the cost of its telemetry, space in the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from sluice.concurrency.process import START_FIELD, stat_fields
from sluice.telemetry.metrics import EventCounts

_IMPORTED_S = time.monotonic()

SPANS = EventCounts()
"""Recorded spans by `SpanOutcome`, counted for each destination."""
TELEMETRY_CPU = EventCounts()
"""CPU seconds by `TelemetryPart`.

Threads of libraries, such as gRPC's, do not count; nor does recording a span, which is too short to
be timed each time: `benchmarks/telemetry/span_cost.py` measures it.
"""


def process_age_s() -> float:
    """Return the seconds since the process started.

    Linux reports the start in ticks of a hundredth of a second; elsewhere, and where /proc cannot
    be read, time counts from the import of this module.
    """
    fields = stat_fields(os.getpid())
    if not fields:
        return time.monotonic() - _IMPORTED_S
    started_s = int(fields[START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


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


class DiskCapacity(NamedTuple):
    """Bytes of a file system: free for this user, and in total."""

    free_bytes: int
    size_bytes: int


def disk_capacity(folder: Path) -> DiskCapacity:
    """Return the space of a folder's file system. It hangs where the file system does.

    Raises:
        OSError: there is no such folder; a replica may run on a machine without the run's.
    """
    found = os.statvfs(folder)
    return DiskCapacity(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
