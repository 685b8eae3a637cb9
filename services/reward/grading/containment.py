"""The processes that a scorer has started, wherever they went, found by a mark they all carry.

Killing a scorer's session misses what has left it (`setsid`), and parents say nothing about what
was left behind by a process that ended. The environment is inherited by every fork and, unless
somebody clears it on purpose, by every program started. What clears it is not found here; it has
the scorer's limits, and that of CPU time ends it unless it sleeps or ignores SIGXCPU.
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


# The mark that a scorer process and all it starts carry in their environment.
#
# ``RUN:SERVICE:SCORER``: a digest of the run's folder, the reward service as process id and
# start time, and a number that no other scorer has. The first two are the family of a pool's
# scorers.

MARK_VARIABLE = "SLUICE_SCORER_MARK"
_MARK = re.compile(
    rb"(?:^|\0)" + MARK_VARIABLE.encode() + rb"=([0-9a-f]{16}:\d+-\d+:[0-9a-f]{32})(?:\0|$)"
)
_RUN_DIGITS = 16
_STATE_FIELD, _MARKED_START_FIELD = 0, 19  # after the command's name in /proc/PID/stat
_ENDED = frozenset("ZXx")


def family_of(run_dir: Path | None = None) -> str:
    """The family of the scorers that this process starts for a run; ``None``: for no run.

    Without a run every call makes a family of its own. Services in other containers are other
    runs' even in the same folder: their process ids mean nothing here.
    """
    if run_dir is None:
        run = uuid4().hex[:_RUN_DIGITS]
    else:
        named = f"{_process_namespace()}\0{run_dir.resolve()}"
        run = sha256(named.encode()).hexdigest()[:_RUN_DIGITS]
    return f"{run}:{os.getpid()}-{_start_of(os.getpid()) or 0}"


def new_mark(family: str | None = None) -> str:
    """A value of `MARK_VARIABLE` that no other scorer has; of a family of its own by default."""
    return f"{family or family_of()}:{uuid4().hex}"


def mark_in(environment: bytes) -> str | None:
    """The mark in what /proc/PID/environ holds."""
    match = _MARK.search(environment)
    return None if match is None else match[1].decode()


def is_left_behind(mark: str, family: str) -> bool:
    """Whether it is of the same run, and of another service, which has ended."""
    run, service, _ = mark.split(":")
    own_run, own_service = family.split(":")
    if run != own_run or service == own_service:
        return False
    pid, start = map(int, service.split("-"))
    return _start_of(pid) != start


def _start_of(pid: int) -> int | None:
    """In ticks since the machine's start; ``None`` for a process that has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE_FIELD] in _ENDED else int(fields[_MARKED_START_FIELD])


def _process_namespace() -> str:
    try:
        return str((_PROC / "self" / "ns" / "pid").readlink())
    except OSError:
        return ""


# Scorer processes that have nothing to score and use CPU all the same.
#
# A scorer may answer, or fail, and leave threads or processes behind that spin: no sample's time
# limit ends them any more. So CPU time used in idleness is looked at about once a second, of the
# process and of all it started.
#
# Consumes: which processes are idle. Waits for: the next look. Unblocked by: the clock.
# Produces: the processes that are to be ended. On failure to read about a process: it used
# nothing. On shutdown: cancelled.

LOOK_INTERVAL_S = 0.75
"""Between looks. The first is the reference and the second finds a spinning thread: 1.5 s."""
MOST_IDLE_CPU_S = 0.5
"""CPU seconds in one window of idleness that are borne: threads that end, keepalives, a garbage
collection. A spinning thread of an idle machine uses more from one look to the next."""
WINDOW_S = 5.0
"""Seconds of idleness judged together: on a busy machine a spinning thread gets but a part."""
LOOK_SHARE = 0.02
"""Of one core that looking may cost: where there are thousands of processes it is rarer."""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """An idle scorer process at one moment.

    Attributes:
        num_uses: requests that it had been given by then; it idles on while they stay the same.
        at_s: on a monotonic clock.
        cpu_s: CPU seconds since its start of each of its processes.
    """

    num_uses: int
    at_s: float
    cpu_s: Mapping[ProcessKey, float]


@dataclass(frozen=True, slots=True)
class IdleCpu:
    """`cpu_s` seconds of CPU time were used in `idle_s` seconds without a request."""

    cpu_s: float
    idle_s: float

    @property
    def is_too_much(self) -> bool:
        """Whether the process is to be ended."""
        return self.cpu_s > MOST_IDLE_CPU_S


def idle_cpu(reference: CpuReading, reading: CpuReading) -> IdleCpu | None:
    """What was used from one sight to the next; ``None``: it had a request between them.

    A process seen for the first time has used all its time in between, for it was started then.
    """
    if reference.num_uses != reading.num_uses:
        return None
    used = (max(0.0, now - reference.cpu_s.get(key, 0.0)) for key, now in reading.cpu_s.items())
    return IdleCpu(sum(used), reading.at_s - reference.at_s)


class IdleWatch:
    """The sights that later ones are compared with, by the mark of the scorer process."""

    def __init__(self) -> None:
        self._references: dict[str, CpuReading] = {}

    def burning(self, sights: Mapping[str, CpuReading]) -> dict[str, IdleCpu]:
        """Those of the idle processes that use too much; those without a sight are forgotten."""
        references, self._references = self._references, {}
        found: dict[str, IdleCpu] = {}
        for mark, reading in sights.items():
            reference = references.get(mark, reading)
            used = idle_cpu(reference, reading)
            is_same_window = used is not None and used.idle_s < WINDOW_S
            self._references[mark] = reference if is_same_window else reading
            if used is not None and used.is_too_much:
                found[mark] = used
        return found


async def watch_idle(
    idle: Callable[[], Mapping[str, int]], end: Callable[[str, int, IdleCpu], Awaitable[None]]
) -> None:
    """Look until cancelled.

    Args:
        idle: number of requests so far of each scorer process that has none now, by mark.
        end: ends one; it must see for itself that the process still idles at that number.
    """
    watch = IdleWatch()
    look_s = 0.0
    while True:
        await asyncio.sleep(max(LOOK_INTERVAL_S, look_s / LOOK_SHARE))
        before = idle()
        if not before:
            continue
        seen, look_s = await asyncio.to_thread(_timed_look, set(before))
        # A process that got a request meanwhile had a reason to use its CPU.
        steady = {mark: n for mark, n in idle().items() if mark in seen and before.get(mark) == n}
        at_s = time.monotonic()
        sights = {mark: CpuReading(n, at_s, seen[mark]) for mark, n in steady.items()}
        for mark, used in watch.burning(sights).items():
            await end(mark, steady[mark], used)


def _timed_look(marks: set[str]) -> tuple[dict[str, dict[ProcessKey, float]], float]:
    started_s = time.thread_time()
    return cpu_by_mark(marks), time.thread_time() - started_s
