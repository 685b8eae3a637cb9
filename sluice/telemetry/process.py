"""What a process measures of itself: its age, the cost of its telemetry, space in the run's
folder.
"""

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
    """Seconds since the process started.

    Linux tells the start in ticks of a hundredth of a second; elsewhere, and where /proc cannot be
    read, time counts from the import of this module.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(stat.rsplit(")", 1)[1].split()[_STARTED_FIELD])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_S


# What telling about a run costs this process: CPU of the threads that do it, and spans.
#
# Recording a span takes a few microseconds in whichever thread works, which is too little to be
# timed each time; `benchmarks.telemetry.span_cost` measures it. Threads of libraries (gRPC's, for
# one) do not count.


class TelemetryPart(StrEnum):
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
        self._seconds = dict.fromkeys(TelemetryPart, 0.0)

    @contextmanager
    def charged(self, part: TelemetryPart) -> Iterator[None]:
        """What this thread computes inside counts for `part`. Must not be nested."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            spent_s = time.thread_time() - began_s
            with self._lock:
                self._seconds[part] += spent_s

    def seconds(self) -> Mapping[TelemetryPart, float]:
        """CPU seconds so far."""
        with self._lock:
            return dict(self._seconds)


TELEMETRY_CPU = _CpuSeconds()
SPANS = EventCounts()
"""By `SpanFate`, for each exporter that a span goes to."""


# How much room a folder's file system has, read by a thread that may hang without anybody else.
#
# Consumes: nothing. Waits for: the file system, which may be mounted from a machine that is
# gone, and the next look. Unblocked by: its answer; `stop`, between two looks. Produces: the
# last reading. On failure: there is none. On shutdown: a thread that hangs ends with the
# process.


_INTERVAL_S = 10.0
_FIRST_LOOK_S = 0.5


class DiskCapacity(NamedTuple):
    """Bytes of a file system: free for this user, and in all."""

    free_bytes: int
    size_bytes: int


class DiskSpace:
    """Looks now and then, from its start on.

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
        """Looks from here on."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no more; waits for nothing."""
        self._is_stopped.set()

    def capacity(self) -> DiskCapacity | None:
        """What the last look found; ``None`` without such a folder, or before the first answer.

        Waits for the first answer half a second at most, and for later ones not at all.
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
