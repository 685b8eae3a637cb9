"""The processes of a sandbox: the memory that they hold together, and their end."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it, as far as the kernel lists children."""
    yield pid
    for file in _PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            for child in file.read_text(encoding="ascii").split():
                yield from descendants(int(child))


def memory_of(pid: int) -> int:
    """Return the bytes that a process and its descendants hold; shared pages count once."""
    found = list(descendants(pid))
    return sum(map(_proportional, found))


def resident_of(pid: int) -> int:
    """Return the same, with shared pages counted for each process: quick, and never too little."""
    return sum(map(_resident, list(descendants(pid))))


def _parent_of(pid: int) -> int:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _resident(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
    except ProcessLookupError:
        return 0
    except OSError:
        return _resident(pid)
    sizes = [line.split()[1] for line in lines if line.startswith("Pss:")]
    return int(sizes[0]) * 1024 if sizes else _resident(pid)


class ProcessHandle:
    """A child's child, by a descriptor that never means another process.

    Args:
        pid: of the process.
        parent: of its parent, which must not have been reaped yet.

    Raises:
        ProcessLookupError: the process has ended.
    """

    def __init__(self, pid: int, parent: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        if _parent_of(pid) != parent:  # it ended, and the number may be another one's by now
            self.close()
            raise ProcessLookupError(pid)

    def kill_and_wait(self, timeout_s: float) -> bool:
        """Kill it; return whether it ended in time.

        If it is the first process of a namespace, all others there have ended before it.
        """
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)
