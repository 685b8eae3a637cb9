"""Ends this process when it burns CPU time while no thread of Python's can run.

A call that keeps the interpreter's lock, such as a regular expression that backtracks without end,
stops every thread, the one that would notice included. The kernel's timer of the process's CPU
time (``ITIMER_PROF``) needs no lock, and hardly moves while the process is stopped, its machine
sleeps, or weights are written to a slow disk, which keeps the lock for minutes and is no fault.
What keeps the lock without using CPU, such as a read of a dead disk in C code, is not seen.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TextIO

MOST_CPUS = 8
"""CPUs that are reckoned to be busy at once while the lock is kept: one that is kept alone on a
machine of many is found that many times later, but not never."""


class CpuDeadline:
    """A limit of CPU time from one sign of life to the next; beyond it SIGPROF ends the process.

    The stacks of all threads are written first. There is one such timer in a process: where
    somebody else uses it, a profiler for one, nothing is limited.

    Args:
        seconds: wall-clock time that a block may last at least, whatever number of threads (up to
            `MOST_CPUS`) uses the CPU beside it; the limit is this times the CPUs.
        stacks_file: where stacks are added; ``None``, or one that cannot be written: nowhere.
    """

    def __init__(self, seconds: float, stacks_file: Path | None = None) -> None:
        self._cpu_s = seconds * min(os.cpu_count() or 1, MOST_CPUS)
        self._stacks_file = stacks_file
        self._file: TextIO | None = None
        self._is_ours = False

    @property
    def cpu_s(self) -> float:
        """The limit, CPU seconds of all threads together."""
        return self._cpu_s

    def start(self) -> None:
        """Counts from here."""
        is_free = signal.getsignal(signal.SIGPROF) is signal.SIG_DFL
        self._is_ours = is_free and signal.getitimer(signal.ITIMER_PROF)[0] == 0
        if not self._is_ours:
            return
        if self._stacks_file is not None:
            with suppress(OSError):
                self._stacks_file.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._stacks_file.open("a", encoding="utf-8")
                faulthandler.register(signal.SIGPROF, self._file, all_threads=True, chain=True)
        self.push_back()

    def push_back(self) -> None:
        """A sign of life: counts anew. Callable from any thread."""
        if self._is_ours:
            signal.setitimer(signal.ITIMER_PROF, self._cpu_s)

    def stop(self) -> None:
        """Counts no longer."""
        if not self._is_ours:
            return
        self._is_ours = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if self._file is not None:
            faulthandler.unregister(signal.SIGPROF)
            self._file.close()
            self._file = None
