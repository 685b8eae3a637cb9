"""How much room a folder's file system has, read by a thread that may hang without anybody else.

Consumes: nothing. Waits for: the file system, which may be mounted from a machine that is gone, and
the next look. Unblocked by: its answer; `stop`, between two looks. Produces: the last reading. On
failure: there is none. On shutdown: a thread that hangs ends with the process.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

__all__ = ["DiskCapacity", "DiskSpace"]

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
