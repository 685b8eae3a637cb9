"""The processes that a scorer has started, wherever they went, found by a mark they all carry.

Killing a scorer's session misses what has left it (`setsid`), and parents say nothing about what
was left behind by a process that ended. The environment is inherited by every fork and, unless
somebody clears it on purpose, by every program started; what clears it is bounded by the scorer's
CPU limit, which is inherited too.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from uuid import uuid4

__all__ = ["MARK_VARIABLE", "end_marked", "kill_marked", "marked_processes", "new_mark"]

MARK_VARIABLE = "SLUICE_SCORER_MARK"
_PROC = Path("/proc")
_PAUSE_S = 0.01


def new_mark() -> str:
    """A value of `MARK_VARIABLE` that no other scorer has."""
    return uuid4().hex


def marked_processes(mark: str) -> list[int]:
    """Pids of the running processes with `mark`; none where there is no /proc."""
    sought = f"{MARK_VARIABLE}={mark}".encode()
    return [int(pid) for pid in _pids() if sought in _environment(pid)]


def kill_marked(mark: str) -> int:
    """Kills those that run now; how many. They may have forked meanwhile: repeat until 0."""
    pids = marked_processes(mark)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids)


async def end_marked(mark: str) -> None:
    """Kills until none is left; the caller sets the deadline."""
    while True:
        if not kill_marked(mark):
            return
        await asyncio.sleep(_PAUSE_S)


def _pids() -> list[str]:
    return [entry for entry in os.listdir(_PROC) if entry.isdigit()] if _PROC.is_dir() else []


def _environment(pid: str) -> bytes:
    """Empty for processes of others, and for those that have ended."""
    try:
        return (_PROC / pid / "environ").read_bytes()
    except OSError:
        return b""
