"""Watch from a separate thread whether this process makes progress, its event loop included;
end it when it stalls.

The event loop describes its work at intervals (`WorkState`); a thread looks at what it described
(`StallJudge`). After `stall_s` without progress the watchdog logs what the process waits for and
adds the stacks of all threads and tasks to a file of the run's logs. After `give_up_s` it does the
same and ends the process with `EXIT_STALLED`, so that its supervisor restarts it. If no thread can
look because one keeps the interpreter's lock, the kernel ends the process (`CpuDeadline`). A report
that takes longer than `REPORT_TIMEOUT_S` is left out: a log that hangs must not keep a process
alive.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from sluice.concurrency.process import mark_process
from sluice.concurrency.waits import Waiting, merge_waits, present_waits
from sluice.config.schema.service import ServiceConfig
from sluice.errors import SluiceError

EXIT_STALLED = 75
"""Nothing moved for `sluice.watchdog.give_up_s`; sysexits.h calls it a temporary failure."""

REPORT_TIMEOUT_S = 5.0
_MAX_INTERVAL_S = 1.0
_LOOKS_A_STALL = 8
_LAST_WORDS = "%s\nthe process ends with exit code %d"
_MAX_TASKS = 500
_MAX_MISSED_INTERVALS = 3
logger = logging.getLogger(__name__)

MAX_CPUS = 8
"""CPUs assumed busy at once while a thread keeps the lock. If it is the only busy one, it is found
that many times later."""


def write_stacks(file: TextIO, loop: asyncio.AbstractEventLoop | None) -> None:
    """Write the stacks of all threads and tasks. Any thread may call, also while the loop hangs.

    Args:
        file: one with a file descriptor.
        loop: whose tasks; ``None``: only threads.
    """
    file.write("threads:\n")
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
    if loop is None:
        return
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    file.write(f"{len(tasks)} tasks:\n")
    for task in tasks[:_MAX_TASKS]:
        file.write(f"  {task.get_name()}\n")
        for line in _frames(task.get_coro()):
            file.write(f"    {line}\n")
    file.flush()


def _frames(waiting: object) -> Iterator[str]:
    """Describe the frames from a task's coroutine down to what it awaits."""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            yield f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


@dataclass(frozen=True, slots=True)
class WorkState:
    """The state of a process's work.

    Attributes:
        progress: a value that differs whenever something moved.
        has_work: whether something should move; false for a paused or idle process.
        patience_s: seconds that the current wait may last by its own deadline, which ends it.
        waits: waits that only the service knows, in addition to the registry's.
    """

    progress: object
    has_work: bool = True
    patience_s: float = 0.0
    waits: tuple[Waiting, ...] = ()


class StallVerdict(StrEnum):
    """The result of one look."""

    FINE = "fine"
    STALLED = "stalled"
    HOPELESS = "hopeless"


class StallJudge:
    """Judges from beats, which come as long as the event loop runs, whether work stands still.

    Time counts only while this process runs: time that a signal stopped it or that its machine
    slept does not count. The event loop calls `beat`; one other thread calls everything else.

    Args:
        stall_s: seconds without progress that are reported; ``None``: none are.
        give_up_s: seconds without progress until the process is given up; ``None``: it never is.
        interval_s: seconds between two looks, and between two beats.
    """

    def __init__(self, stall_s: float | None, give_up_s: float | None, interval_s: float) -> None:
        self._stall_s = stall_s
        self._give_up_s = give_up_s
        self._interval_s = interval_s
        self._beat: tuple[int, WorkState] | None = None
        self._seen: tuple[int, WorkState] | None = None
        self._looked_s: float | None = None
        # Seconds that count in all, and what they were when something moved and when a beat came.
        self._lived_s = 0.0
        self._moved_at_s = 0.0
        self._beaten_at_s = 0.0
        self._is_reported = False

    def beat(self, work_state: WorkState) -> None:
        """Note that the event loop runs, and what it found."""
        self._beat = (0 if self._beat is None else self._beat[0] + 1, work_state)

    def check(self, now_s: float) -> StallVerdict:
        """Return the verdict; `STALLED` once in each stall."""
        self._live_until(now_s)
        beat, last_beat = self._beat, self._seen
        if beat is None:
            return StallVerdict.FINE
        if last_beat is None or beat[0] != last_beat[0]:
            self._seen, self._beaten_at_s = beat, self._lived_s
            if (
                last_beat is None
                or not beat[1].has_work
                or beat[1].progress != last_beat[1].progress
            ):
                self._moved_at_s, self._is_reported = self._lived_s, False
        return self._judge()

    @property
    def no_progress_s(self) -> float:
        """Return the seconds that count since something moved or there was nothing to do."""
        return self._lived_s - self._moved_at_s

    @property
    def no_progress_at_work_s(self) -> float | None:
        """Return `no_progress_s`, or ``None`` while there is nothing to do."""
        last_beat = self._seen
        return self.no_progress_s if last_beat is not None and last_beat[1].has_work else None

    @property
    def blocked_s(self) -> float:
        """Return the seconds that count since the event loop ran; 0 while it does."""
        missed_s = self._lived_s - self._beaten_at_s
        return missed_s if missed_s > _MAX_MISSED_INTERVALS * self._interval_s else 0.0

    def _live_until(self, now_s: float) -> None:
        if self._looked_s is not None:
            max_s = _MAX_MISSED_INTERVALS * self._interval_s
            self._lived_s += min(now_s - self._looked_s, max_s)
        self._looked_s = now_s

    def _judge(self) -> StallVerdict:
        last_beat = self._seen
        assert last_beat is not None
        # A blocked event loop cannot end its wait by the wait's own deadline.
        patience_s = 0.0 if self.blocked_s else last_beat[1].patience_s
        if self._give_up_s is not None and self.no_progress_s >= max(
            self._give_up_s, patience_s + (self._stall_s or 0.0) if patience_s else 0.0
        ):
            return StallVerdict.HOPELESS
        if (
            self._stall_s is not None
            and self.no_progress_s >= self._stall_s
            and not self._is_reported
        ):
            self._is_reported = True
            return StallVerdict.STALLED
        return StallVerdict.FINE


class CpuDeadline:
    """A limit of CPU time between two signs of life; beyond it SIGPROF ends the process.

    A call that keeps the interpreter's lock, such as a regular expression that backtracks without
    end, stops every thread, the watchdog's included. The kernel's timer of the process's CPU time
    (``ITIMER_PROF``) needs no lock. It hardly moves while the process is stopped, its machine
    sleeps, or weights are written to a slow disk, which keeps the lock for minutes and is no fault.
    A call that keeps the lock without using CPU, such as a read of a dead disk in C code, is not
    found.

    The stacks of all threads are written first. A process has one such timer: where another
    component uses it, such as a profiler, nothing is limited.

    Attributes:
        cpu_s: the limit, in CPU seconds of all threads together.

    Args:
        seconds: wall-clock time that a block may last at least, with any number of other threads
            (up to `MAX_CPUS`) on the CPU; the limit is this times the CPUs.
        stacks_file: where stacks are added; ``None``, or one that cannot be written: nowhere.
    """

    def __init__(self, seconds: float, stacks_file: Path | None = None) -> None:
        self.cpu_s = seconds * min(os.cpu_count() or 1, MAX_CPUS)
        self._stacks_file = stacks_file
        self._file: TextIO | None = None
        self._is_ours = False

    def start(self) -> None:
        """Start to count."""
        is_free = signal.getsignal(signal.SIGPROF) is signal.SIG_DFL
        self._is_ours = is_free and signal.getitimer(signal.ITIMER_PROF)[0] == 0
        if not self._is_ours:
            return
        if self._stacks_file is not None:
            with suppress(OSError):
                self._stacks_file.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._stacks_file.open("a", encoding="utf-8")
                faulthandler.register(signal.SIGPROF, self._file, all_threads=True, chain=True)
        self.restart()

    def restart(self) -> None:
        """Give a sign of life: count from 0 again. Any thread may call."""
        if self._is_ours:
            signal.setitimer(signal.ITIMER_PROF, self.cpu_s)

    def stop(self) -> None:
        """Stop counting."""
        if not self._is_ours:
            return
        self._is_ours = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if self._file is not None:
            faulthandler.unregister(signal.SIGPROF)
            self._file.close()
            self._file = None


class Watchdog:
    """The thread that watches a process, and the beats of its event loop.

    Args:
        work_state: describes the work; called in the event loop, must not block. If it raises
            `SluiceError`, there is no beat.
        stacks_file: where stacks are added; ``None``: nowhere.
        interval_s: seconds between two looks.
        cpu_deadline: pushed back by each look; ``None``: a kept interpreter's lock is tolerated.
    """

    def __init__(
        self,
        judge: StallJudge,
        work_state: Callable[[], WorkState],
        *,
        stacks_file: Path | None = None,
        interval_s: float = _MAX_INTERVAL_S,
        end: Callable[[int], object] = os._exit,
        cpu_deadline: CpuDeadline | None = None,
    ) -> None:
        self._judge = judge
        self._work_state = work_state
        self._stacks_file = stacks_file
        self._interval_s = interval_s
        self._end = end
        self._cpu_deadline = cpu_deadline
        # The service's own waits at the last beat, and when that was.
        self._known: tuple[tuple[Waiting, ...], float] = ((), 0.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = threading.Event()
        self._next: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs; needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._beat()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if self._cpu_deadline is not None:
            self._cpu_deadline.start()
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            if self._next is not None:
                self._next.cancel()
            thread.join(self._interval_s + REPORT_TIMEOUT_S)
            if self._cpu_deadline is not None:
                self._cpu_deadline.stop()

    def _beat(self) -> None:
        assert self._loop is not None
        self._next = self._loop.call_later(self._interval_s, self._beat)
        with suppress(SluiceError):
            state = self._work_state()
            self._known = (state.waits, time.monotonic())
            self._judge.beat(state)

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            if self._cpu_deadline is not None:
                self._cpu_deadline.restart()
            verdict = self._judge.check(time.monotonic())
            if verdict is StallVerdict.STALLED:
                self._report_within_timeout(lambda: logger.warning("%s", self._report()))
            elif verdict is StallVerdict.HOPELESS:
                self._report_within_timeout(
                    lambda: logger.error(_LAST_WORDS, self._report(), EXIT_STALLED)
                )
                self._end(EXIT_STALLED)
                return

    def _report(self) -> str:
        blocked_s = self._judge.blocked_s
        blocked = (
            f", and the event loop has been blocked for {blocked_s:.0f} s" if blocked_s else ""
        )
        lines = [f"no progress for {self._judge.no_progress_s:.0f} s{blocked}; waiting for:"]
        lines += [f"  {_wait_line(wait)}" for wait in self._waits()] or ["  nobody that is known"]
        if self._stacks_file is not None and self._write_stacks_file(lines[0]):
            lines.append(f"stacks of all threads and tasks: {self._stacks_file}")
        return "\n".join(lines)

    def _waits(self) -> tuple[Waiting, ...]:
        waits, seen_s = self._known
        age_s = time.monotonic() - seen_s
        service_waits = [replace(wait, seconds=wait.seconds + age_s) for wait in waits]
        return merge_waits((*service_waits, *present_waits()))

    def _write_stacks_file(self, title: str) -> bool:
        assert self._stacks_file is not None
        try:
            self._stacks_file.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks_file.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n")
                write_stacks(file, self._loop)
        except (OSError, RuntimeError):  # no disk, or tasks that come and go too fast
            return False
        return True

    def _report_within_timeout(self, report: Callable[[], None]) -> None:
        thread = threading.Thread(target=report, name="watchdog report", daemon=True)
        thread.start()
        thread.join(REPORT_TIMEOUT_S)


def _wait_line(wait: Waiting) -> str:
    times = f", {wait.count} times" if wait.count > 1 else ""
    task = f" [{wait.task}]" if wait.task else ""
    return f"{wait.peer}: {wait.phase} ({wait.seconds:.0f} s{times}){task}"


_watching: list[StallJudge] = []


def no_progress_seconds() -> float | None:
    """Return the seconds without progress; ``None``: no work, or no watchdog."""
    return _watching[-1].no_progress_at_work_s if _watching else None


@contextmanager
def watch_service(
    name: str,
    service: ServiceConfig,
    work_state: Callable[[], WorkState],
    *,
    address: str = "",
) -> Iterator[None]:
    """Watch a service, and note its process in the run's folder, while the block runs.

    Args:
        name: the service's, or the replica's.
        work_state: see `Watchdog`.
        address: where it serves, host:port.
    """
    run_dir, limits = Path(service.run_dir), service.watchdog
    known_s = [limit_s for limit_s in (limits.stall_s, limits.give_up_s) if limit_s is not None]
    interval_s = min([_MAX_INTERVAL_S, *(limit_s / _LOOKS_A_STALL for limit_s in known_s)])
    stacks_file = run_dir / "logs" / f"{name}.stacks.txt" if run_dir.is_dir() else None
    judge = StallJudge(limits.stall_s, limits.give_up_s, interval_s)
    give_up_s = limits.give_up_s
    watchdog = Watchdog(
        judge,
        work_state,
        stacks_file=stacks_file,
        interval_s=interval_s,
        cpu_deadline=None if give_up_s is None else CpuDeadline(give_up_s, stacks_file),
    )
    _watching.append(judge)
    try:
        with mark_process(run_dir, name, address), watchdog.watching():
            yield
    finally:
        _watching.remove(judge)
