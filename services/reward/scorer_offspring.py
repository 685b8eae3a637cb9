"""The processes that a scorer has started, wherever they went, found by a mark they all carry.

Killing a scorer's session misses what has left it (`setsid`), and parents say nothing about what
was left behind by a process that ended. The environment is inherited by every fork and, unless
somebody clears it on purpose, by every program started. What clears it is not found here; it has
the scorer's limits, and that of CPU time ends it unless it sleeps or ignores SIGXCPU.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from services.reward.scorer_mark import MARK_VARIABLE, is_left_behind, mark_in, new_mark

__all__ = [
    "MARK_VARIABLE",
    "ProcessKey",
    "cpu_by_mark",
    "end_left_behind",
    "end_marked",
    "marked_processes",
    "new_mark",
]

ProcessKey = tuple[int, int]
"""A process's id and its start in ticks, which tells it from a later one with the same id."""

NUM_EMPTY_LOOKS, EMPTY_FOR_S = 5, 0.2
"""Looks without a find, and their time, after which there is nobody: a process that replaces itself
by a fork again and again can be missed by one look."""
NUM_GLANCES, NUM_NEWEST = 10, 3
"""Per look: glances at the newest process ids, and how many of them each takes in. Measured with a
process that replaces itself 1000 times a second: listing all processes and reading each finds it
in 2 to 17 of 100 looks, for it is gone when its turn comes; ten glances found it in all of 549,
and in 107 of 109 while another thread of this process kept its interpreter busy.
"""
_PROC = Path("/proc")
# The second is some containers' own invention, with an id of the machine's.
_LAST_PID = (_PROC / "sys" / "kernel" / "ns_last_pid", _PROC / "loadavg")
_PAUSE_S = 0.01
_USER_FIELD, _SYSTEM_FIELD, _START_FIELD = 11, 12, 19  # after the command's name in /proc/PID/stat


def marked_processes(prefix: str) -> list[int]:
    """Pids of the running processes whose mark begins so; none where there is no /proc."""
    return [int(pid) for pid in _pids() if _mark_of(pid).startswith(prefix)]


def cpu_by_mark(marks: Collection[str]) -> dict[str, dict[ProcessKey, float]]:
    """CPU seconds that each running process with one of `marks` has used, all its threads added up.

    One look at all processes, however many marks. Marks without a process are left out; all, where
    there is no /proc.
    """
    found: dict[str, dict[ProcessKey, float]] = {}
    for pid in _pids():
        if (mark := _mark_of(pid)) not in marks:
            continue
        if (used := _cpu_used(pid)) is not None:
            key, seconds = used
            found.setdefault(mark, {})[key] = seconds
    return found


async def end_marked(prefix: str) -> None:
    """Kills all whose mark begins so until none is left; the caller sets the deadline."""
    await _end(lambda mark: mark.startswith(prefix))


async def end_left_behind(family: str) -> None:
    """Kills what earlier services of the same run started and could not end, until none is left.

    The caller sets the deadline. A service that still runs keeps its own.
    """
    await _end(partial(is_left_behind, family=family))


async def _end(is_sought: Callable[[str], bool]) -> None:
    num_empty, empty_since = 0, 0.0
    while num_empty < NUM_EMPTY_LOOKS or time.monotonic() - empty_since < EMPTY_FOR_S:
        # In a thread: thousands of processes take a while to look at.
        if await asyncio.to_thread(_kill, is_sought):
            num_empty = 0
            await asyncio.sleep(_PAUSE_S)
            continue
        if num_empty == 0:
            empty_since = time.monotonic()
        num_empty += 1
        await asyncio.sleep(EMPTY_FOR_S / NUM_EMPTY_LOOKS)


def _kill(is_sought: Callable[[str], bool]) -> int:
    """One look; how many were found. They may have forked meanwhile."""
    found = {pid for _ in range(NUM_GLANCES) for pid in _stopped(_newest_pids(), is_sought)}
    # The youngest first, as a rule: they are the first to be gone again.
    found.update(_stopped(sorted(_pids(), key=int, reverse=True), is_sought))
    for pid in found:
        _send(pid, signal.SIGKILL)
    return len(found)


def _stopped(pids: Iterable[str], is_sought: Callable[[str], bool]) -> list[str]:
    """Those of `pids` that are sought, each stopped at once: none may fork on before its turn."""
    found = []
    for pid in pids:
        if (mark := _mark_of(pid)) and is_sought(mark):
            _send(pid, signal.SIGSTOP)
            found.append(pid)
    return found


def _send(pid: str, number: signal.Signals) -> None:
    try:
        os.kill(int(pid), number)
    except ProcessLookupError:
        return


def _pids() -> list[str]:
    return list(filter(str.isdigit, os.listdir(_PROC))) if _PROC.is_dir() else []


def _newest_pids() -> list[str]:
    """The last ids of this namespace, whether or not a process has them; the newest first.

    None where the system does not tell; the list of all processes has to do there.
    """
    for file in _LAST_PID:
        try:
            last = int(file.read_bytes().split()[-1])
        except (OSError, ValueError, IndexError):
            continue
        return [str(pid) for pid in range(last, max(last - NUM_NEWEST, 0), -1)]
    return []


def _cpu_used(pid: str) -> tuple[ProcessKey, float] | None:
    """``None`` for a process that has ended."""
    try:
        stat = (_PROC / pid / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name, in parentheses, may hold anything.
    fields = stat.rpartition(")")[2].split()
    num_ticks = int(fields[_USER_FIELD]) + int(fields[_SYSTEM_FIELD])
    return (int(pid), int(fields[_START_FIELD])), num_ticks / os.sysconf("SC_CLK_TCK")


def _mark_of(pid: str) -> str:
    """Empty for processes without one or of others, and for those that have ended."""
    try:
        return mark_in((_PROC / pid / "environ").read_bytes()) or ""
    except OSError:
        return ""
