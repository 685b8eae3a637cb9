"""How long this process has lived, from before its first line of Python ran."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
