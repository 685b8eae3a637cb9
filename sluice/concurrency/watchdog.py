"""Watches from a thread of its own whether this process gets on, its event loop included.

Consumes: sightings, taken in the event loop at intervals. Waits for: the time of the next look.
Produces: after `stall_s` without progress what is waited for, as a warning, and the stacks of all
threads and tasks in a file of the run's logs; after `give_up_s` the same and the end of the
process with the exit code `EXIT_STALLED`, so that whoever supervises it can start it again. Where
no thread can look any more because one keeps the interpreter's lock, SIGPROF ends the process
(`cpu_deadline`, which also says what is not seen).
On failure: a report that cannot be written or told in `REPORT_TIMEOUT_S` is left out; a stuck log
must not keep the process from its end.
On shutdown: the block ends, and the thread with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sluice.concurrency.cpu_deadline import CpuDeadline
from sluice.concurrency.process_mark import marked_process
from sluice.concurrency.stacks import write_stacks
from sluice.concurrency.stall import StallJudge, Verdict, WorkState
from sluice.concurrency.waits import WAITS, Waiting
from sluice.config.service import ServiceConfig
from sluice.errors import SluiceError

logger = logging.getLogger(__name__)

EXIT_STALLED = 75
"""Nothing moved for `sluice.watchdog.give_up_s`; sysexits.h calls it a temporary failure."""

REPORT_TIMEOUT_S = 5.0
_MOST_BETWEEN_LOOKS_S, _LOOKS_A_STALL = 1.0, 8
_LAST_WORDS = "%s\nthe process ends with exit code %d"

Waits = Callable[[], Sequence[Waiting]]


class Watchdog:
    """One process's; used as a context manager inside a running event loop.

    Args:
        judge: decides.
        sight: looks at the work; called in the event loop, must not block. One that raises
            `SluiceError` has seen nothing.
        waits: what is waited for; called in the watchdog's thread.
        stacks_file: where stacks are added; ``None``: nowhere.
        interval_s: seconds between two looks.
        end: ends the process at once.
        cpu_deadline: pushed back by each look; ``None``: a kept interpreter's lock is borne.
    """

    def __init__(
        self,
        judge: StallJudge,
        work_state: Callable[[], WorkState],
        *,
        waits: Waits = WAITS.snapshot,
        stacks_file: Path | None = None,
        interval_s: float = _MOST_BETWEEN_LOOKS_S,
        end: Callable[[int], object] = os._exit,
        cpu_deadline: CpuDeadline | None = None,
    ) -> None:
        self._judge, self._work_state, self._waits = judge, work_state, waits
        self._stacks_file, self._interval_s, self._end = stacks_file, interval_s, end
        self._cpu_deadline = cpu_deadline
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = threading.Event()
        self._next: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches while the block runs."""
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

    @property
    def still_s(self) -> float | None:
        """Seconds without progress; ``None`` while there is nothing to do."""
        return self._judge.still_at_work_s

    def _beat(self) -> None:
        assert self._loop is not None
        self._next = self._loop.call_later(self._interval_s, self._beat)
        with suppress(SluiceError):
            self._judge.beat(self._work_state())

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            if self._cpu_deadline is not None:
                self._cpu_deadline.push_back()
            verdict = self._judge.look(time.monotonic())
            if verdict is Verdict.STALLED:
                self._within_bounds(lambda: logger.warning("%s", self._report()))
            elif verdict is Verdict.HOPELESS:
                self._within_bounds(lambda: logger.error(_LAST_WORDS, self._report(), EXIT_STALLED))
                self._end(EXIT_STALLED)
                return

    def _report(self) -> str:
        blocked_s = self._judge.blocked_s
        blocked = (
            f", and the event loop has been blocked for {blocked_s:.0f} s" if blocked_s else ""
        )
        lines = [f"no progress for {self._judge.still_s:.0f} s{blocked}; waiting for:"]
        lines += [f"  {line_of(wait)}" for wait in self._waits()] or ["  nobody that is known"]
        if self._stacks_file is not None and self._stacks_written(lines[0]):
            lines.append(f"stacks of all threads and tasks: {self._stacks_file}")
        return "\n".join(lines)

    def _stacks_written(self, title: str) -> bool:
        assert self._stacks_file is not None
        try:
            self._stacks_file.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks_file.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n")
                write_stacks(file, self._loop)
        except (OSError, RuntimeError):  # no disk, or tasks that come and go too fast
            return False
        return True

    def _within_bounds(self, report: Callable[[], None]) -> None:
        thread = threading.Thread(target=report, name="watchdog report", daemon=True)
        thread.start()
        thread.join(REPORT_TIMEOUT_S)


def line_of(wait: Waiting) -> str:
    """One wait in words."""
    times = f", {wait.count} times" if wait.count > 1 else ""
    task = f" [{wait.task}]" if wait.task else ""
    return f"{wait.peer}: {wait.phase} ({wait.seconds:.0f} s{times}){task}"


_watching: list[Watchdog] = []


def still_seconds() -> float | None:
    """Seconds without progress of this process; ``None``: nothing to do, or nobody watches."""
    return _watching[-1].still_s if _watching else None


@contextmanager
def watched_service(
    name: str,
    service: ServiceConfig,
    work_state: Callable[[], WorkState],
    *,
    address: str = "",
    waits: Waits = WAITS.snapshot,
) -> Iterator[None]:
    """Watches over a service, and notes its process in the run's folder, while the block runs.

    Args:
        name: the service's, or the replica's.
        service: the run's settings.
        sight: looks at its work; see `Watchdog`.
        address: where it serves, host:port.
        waits: what it waits for; called in the watchdog's thread.
    """
    run_dir, limits = Path(service.run_dir), service.watchdog
    known_s = [each for each in (limits.stall_s, limits.give_up_s) if each is not None]
    interval_s = min([_MOST_BETWEEN_LOOKS_S, *(each / _LOOKS_A_STALL for each in known_s)])
    stacks_file = run_dir / "logs" / f"{name}.stacks.txt" if run_dir.is_dir() else None
    judge = StallJudge(limits.stall_s, limits.give_up_s, interval_s)
    give_up_s = limits.give_up_s
    watchdog = Watchdog(
        judge,
        work_state,
        waits=waits,
        stacks_file=stacks_file,
        interval_s=interval_s,
        cpu_deadline=None if give_up_s is None else CpuDeadline(give_up_s, stacks_file),
    )
    _watching.append(watchdog)
    try:
        with marked_process(run_dir, name, address), watchdog.watching():
            yield
    finally:
        _watching.remove(watchdog)
