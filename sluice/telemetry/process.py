"""Measurements of this process: its age, the cost of its telemetry, space in the run's folder."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from sluice.telemetry.metrics import EventCounts

_IMPORTED_S = time.monotonic()
_STARTED_FIELD = 19  # of what follows the command's name; proc(5) counts it as the 22nd


def process_age_s() -> float:
    """Return the seconds since the process started.

    Linux reports the start in ticks of a hundredth of a second; elsewhere, and where /proc cannot
    be read, time counts from the import of this module.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(stat.rsplit(")", 1)[1].split()[_STARTED_FIELD])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_S


class TelemetryPart(StrEnum):
    """The work of telemetry."""

    SPANS = "spans"
    SCRAPES = "scrapes"


class SpanOutcome(StrEnum):
    """The outcome of a recorded span."""

    SENT = "sent"
    DROPPED = "dropped"


class _CpuSeconds:
    """CPU seconds by part. Any thread may charge its own.

    Threads of libraries, such as gRPC's, do not count; nor does recording a span, which is too
    short to be timed each time: `benchmarks/telemetry/span_cost.py` measures it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(TelemetryPart, 0.0)

    @contextmanager
    def charged(self, part: TelemetryPart) -> Iterator[None]:
        """Charge what this thread computes inside the block to `part`. Do not nest blocks."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            spent_s = time.thread_time() - began_s
            with self._lock:
                self._seconds[part] += spent_s

    def seconds(self) -> Mapping[TelemetryPart, float]:
        """Return the CPU seconds so far."""
        with self._lock:
            return dict(self._seconds)


TELEMETRY_CPU = _CpuSeconds()
SPANS = EventCounts()
"""By `SpanOutcome`, for each destination of a span."""


_INTERVAL_S = 10.0
_FIRST_LOOK_S = 0.5


class DiskCapacity(NamedTuple):
    """Bytes of a file system: free for this user, and in total."""

    free_bytes: int
    size_bytes: int


class DiskSpace:
    """The space of a folder's file system, read at intervals by a thread of its own.

    The file system may be mounted from a machine that is gone, and the read hang: then only this
    thread hangs, and ends with the process.

    Args:
        folder: any folder of the file system.
        interval_s: seconds between two looks.
    """

    def __init__(self, folder: Path, interval_s: float = _INTERVAL_S) -> None:
        self._folder, self._interval_s = folder, interval_s
        self._capacity: DiskCapacity | None = None
        self._has_looked, self._is_stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="disk space", daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking; wait for nothing."""
        self._is_stopped.set()

    def capacity(self) -> DiskCapacity | None:
        """Return what the last look found; ``None`` without such a folder, or before an answer.

        It waits half a second at most for the first answer, and never for a later one.
        """
        self._has_looked.wait(_FIRST_LOOK_S)
        return self._capacity

    def _look(self) -> None:
        while True:
            try:
                found = os.statvfs(self._folder)
            except OSError:  # a replica may run on a machine without the folder
                self._capacity = None
            else:
                size = found.f_frsize
                self._capacity = DiskCapacity(found.f_bavail * size, found.f_blocks * size)
            self._has_looked.set()
            if self._is_stopped.wait(self._interval_s):
                return
