"""Find and kill the processes that a scorer has started, by a mark that they all carry; end scorers
that use CPU while idle.

Killing a scorer's session misses processes that have left it (`setsid`), and a process that ended
leaves no trace of its children. So the mark is an environment variable: every fork and every
started program inherits it, unless the environment is cleared on purpose. A process that clears it
is not found here; it has the scorer's limits, and the CPU limit ends it unless it sleeps or ignores
SIGXCPU.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from sluice.concurrency.process import stat_fields

ProcessKey = tuple[int, int]
"""A process id and its start in ticks, which distinguishes it from a later process with that id."""

NUM_EMPTY_LOOKS, EMPTY_FOR_S = 5, 0.2
"""All processes count as gone after so many looks in a row, over so many seconds, find none: one
look can miss a process that replaces itself by a fork again and again."""
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
_STATE_FIELD, _USER_FIELD, _SYSTEM_FIELD, _START_FIELD = 0, 11, 12, 19  # of `stat_fields`

MARK_VARIABLE = "SLUICE_SCORER_MARK"
"""The environment variable of the mark: ``RUN:SERVICE:SCORER``, a digest of the run's folder, the
reward service as process id and start time, and a number that no other scorer has. The first two
are the family of a pool's scorers."""
_MARK = re.compile(
    rb"(?:^|\0)" + MARK_VARIABLE.encode() + rb"=([0-9a-f]{16}:\d+-\d+:[0-9a-f]{32})(?:\0|$)"
)
_RUN_DIGITS = 16
_ENDED = frozenset("ZXx")
LOOK_INTERVAL_S = 0.75
"""Seconds between looks. The first look is the reference; the second finds a spinning thread."""
MAX_IDLE_CPU_S = 0.5
"""CPU seconds in one window of idleness that are accepted: threads that end, keepalives, a garbage
collection. A spinning thread of an idle machine uses more from one look to the next."""
WINDOW_S = 5.0
"""Seconds of idleness that one decision looks at: on a busy machine a spinning thread gets only a
share of a core."""
LOOK_SHARE = 0.02
"""Share of one core that looks may cost: with thousands of processes, looks are rarer."""


def cpu_by_mark(marks: Collection[str]) -> dict[str, dict[ProcessKey, float]]:
    """Return the CPU seconds of each running process with one of `marks`, over all its threads.

    Scan all processes once, for any number of marks. Leave out marks without a process. Without
    /proc the result is empty.
    """
    by_mark: dict[str, dict[ProcessKey, float]] = {}
    for pid in _pids():
        if (mark := _mark_of(pid)) not in marks:
            continue
        if (used := _cpu_used(pid)) is not None:
            key, seconds = used
            by_mark.setdefault(mark, {})[key] = seconds
    return by_mark


async def end_marked(prefix: str) -> None:
    """Kill processes whose mark begins with `prefix` until none is left.

    The caller sets the deadline.
    """
    await _end(lambda mark: mark.startswith(prefix))


async def kill_left_behind(family: str) -> None:
    """Kill processes that earlier services of the run left behind, until none is left.

    The caller sets the deadline. The processes of a service that still runs are spared.
    """
    await _end(partial(is_left_behind, family=family))


async def _end(is_sought: Callable[[str], bool]) -> None:
    num_empty, empty_since = 0, 0.0
    while num_empty < NUM_EMPTY_LOOKS or time.monotonic() - empty_since < EMPTY_FOR_S:
        # In a thread: scanning thousands of processes takes a while.
        if await asyncio.to_thread(_kill, is_sought):
            num_empty = 0
            await asyncio.sleep(_PAUSE_S)
            continue
        if num_empty == 0:
            empty_since = time.monotonic()
        num_empty += 1
        await asyncio.sleep(EMPTY_FOR_S / NUM_EMPTY_LOOKS)


def _kill(is_sought: Callable[[str], bool]) -> int:
    """Kill the processes that one scan finds; return their number. They may have forked
    meanwhile."""
    stopped = {
        pid for _ in range(NUM_GLANCES) for pid in _stop_processes(_newest_pids(), is_sought)
    }
    # As a rule the youngest first, since they may be gone soonest.
    stopped.update(_stop_processes(sorted(_pids(), key=int, reverse=True), is_sought))
    for pid in stopped:
        _send(pid, signal.SIGKILL)
    return len(stopped)


def _stop_processes(pids: Iterable[str], is_sought: Callable[[str], bool]) -> list[str]:
    """Stop each sought process of `pids` as soon as it is found, so that none forks before it is
    killed."""
    stopped = []
    for pid in pids:
        if (mark := _mark_of(pid)) and is_sought(mark):
            _send(pid, signal.SIGSTOP)
            stopped.append(pid)
    return stopped


def _send(pid: str, number: signal.Signals) -> None:
    try:
        os.kill(int(pid), number)
    except ProcessLookupError:
        return


def _pids() -> list[str]:
    return list(filter(str.isdigit, os.listdir(_PROC))) if _PROC.is_dir() else []


def _newest_pids() -> list[str]:
    """Return the latest process ids of this namespace, used or not, the newest first.

    Empty if the system does not report them; the caller then has only the list of all processes.
    """
    for file in _LAST_PID:
        try:
            last_pid = int(file.read_bytes().split()[-1])
        except (OSError, ValueError, IndexError):
            continue
        return [str(pid) for pid in range(last_pid, max(last_pid - NUM_NEWEST, 0), -1)]
    return []


def _cpu_used(pid: str) -> tuple[ProcessKey, float] | None:
    """Return the key and the CPU seconds of a process; ``None`` if it has ended."""
    fields = stat_fields(int(pid))
    if not fields:
        return None
    num_ticks = int(fields[_USER_FIELD]) + int(fields[_SYSTEM_FIELD])
    return (int(pid), int(fields[_START_FIELD])), num_ticks / os.sysconf("SC_CLK_TCK")


def _mark_of(pid: str) -> str:
    """Return a process's mark; empty if it has none or cannot be read."""
    try:
        return mark_in((_PROC / pid / "environ").read_bytes()) or ""
    except OSError:
        return ""


def family_of(run_dir: Path | None = None) -> str:
    """Return the family of the scorers that this process starts for a run (``None``: for no run).

    Without a run, every call makes a new family. Services in other containers belong to other runs,
    even in the same folder: their process ids mean nothing here.
    """
    if run_dir is None:
        run = uuid4().hex[:_RUN_DIGITS]
    else:
        named = f"{_process_namespace()}\0{run_dir.resolve()}"
        run = sha256(named.encode()).hexdigest()[:_RUN_DIGITS]
    return f"{run}:{os.getpid()}-{_start_of(os.getpid()) or 0}"


def new_mark(family: str) -> str:
    """Return a value of `MARK_VARIABLE` that no other scorer has."""
    return f"{family}:{uuid4().hex}"


def mark_in(environment: bytes) -> str | None:
    """Return the mark in the content of /proc/PID/environ."""
    match = _MARK.search(environment)
    return None if match is None else match[1].decode()


def is_left_behind(mark: str, family: str) -> bool:
    """Return whether a mark belongs to the same run and to another service that has ended."""
    run, service, _ = mark.split(":")
    own_run, own_service = family.split(":")
    if run != own_run or service == own_service:
        return False
    pid, start = map(int, service.split("-"))
    return _start_of(pid) != start


def _start_of(pid: int) -> int | None:
    """Return a process's start, in ticks since boot; ``None`` if the process has ended."""
    fields = stat_fields(pid)
    if not fields or fields[_STATE_FIELD] in _ENDED:
        return None
    return int(fields[_START_FIELD])


def _process_namespace() -> str:
    try:
        return str((_PROC / "self" / "ns" / "pid").readlink())
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """An idle scorer process at one moment.

    Attributes:
        num_uses: requests that it got so far; it is idle while the number does not change.
        at_s: on a monotonic clock.
        cpu_s: CPU seconds of each of its processes since their start.
    """

    num_uses: int
    at_s: float
    cpu_s: Mapping[ProcessKey, float]


@dataclass(frozen=True, slots=True)
class IdleCpu:
    """`cpu_s` seconds of CPU time were used in `idle_s` seconds without a request."""

    cpu_s: float
    idle_s: float


def idle_cpu(reference: CpuReading, reading: CpuReading) -> IdleCpu | None:
    """Return the CPU used between two readings; ``None`` if there was a request between them.

    A process that is new in the second reading started in between, so all its CPU time counts.
    """
    if reference.num_uses != reading.num_uses:
        return None
    used = (max(0.0, cpu_s - reference.cpu_s.get(key, 0.0)) for key, cpu_s in reading.cpu_s.items())
    return IdleCpu(sum(used), reading.at_s - reference.at_s)


class IdleWatch:
    """The reference readings for later ones, by the mark of the scorer process."""

    def __init__(self) -> None:
        self._references: dict[str, CpuReading] = {}

    def find_busy(self, readings: Mapping[str, CpuReading]) -> dict[str, IdleCpu]:
        """Return the idle processes that use too much CPU; forget processes without a reading."""
        references, self._references = self._references, {}
        burning: dict[str, IdleCpu] = {}
        for mark, reading in readings.items():
            reference = references.get(mark, reading)
            used = idle_cpu(reference, reading)
            is_same_window = used is not None and used.idle_s < WINDOW_S
            self._references[mark] = reference if is_same_window else reading
            if used is not None and used.cpu_s > MAX_IDLE_CPU_S:
                burning[mark] = used
        return burning


async def watch_idle(
    idle: Callable[[], Mapping[str, int]], end: Callable[[str, int, IdleCpu], Awaitable[None]]
) -> None:
    """End idle processes that use CPU, until cancelled.

    A scorer may answer or fail and leave threads or processes that spin, which no sample's time
    limit ends. So about once a second, compare the CPU time of idle processes, and of all that they
    started, with an earlier reading. A process that cannot be read counts as using nothing.

    Args:
        idle: the request counts of the scorer processes that are idle now, by mark.
        end: ends a process; it must check that the process is still idle at that count.
    """
    watch = IdleWatch()
    look_s = 0.0
    while True:
        await asyncio.sleep(max(LOOK_INTERVAL_S, look_s / LOOK_SHARE))
        idle_before = idle()
        if not idle_before:
            continue
        cpu_by_mark, look_s = await asyncio.to_thread(_read_cpu, set(idle_before))
        # A process that got a request meanwhile had reason to use CPU.
        steady = {
            mark: n
            for mark, n in idle().items()
            if mark in cpu_by_mark and idle_before.get(mark) == n
        }
        at_s = time.monotonic()
        readings = {mark: CpuReading(n, at_s, cpu_by_mark[mark]) for mark, n in steady.items()}
        for mark, used in watch.find_busy(readings).items():
            await end(mark, steady[mark], used)


def _read_cpu(marks: set[str]) -> tuple[dict[str, dict[ProcessKey, float]], float]:
    started_s = time.thread_time()
    return cpu_by_mark(marks), time.thread_time() - started_s
