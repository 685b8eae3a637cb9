"""Limits that a process that runs the user's code sets for itself: address space, open files, CPU
time, further processes, output, and the life of its parent. Wall-clock limits are enforced from
outside.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STDOUT, _STDERR = 1, 2
_CHUNK_BYTES = 1 << 16
_FLUSH_S, _FLUSH_PAUSE_S = 0.2, 0.001
MAX_MORE_PROCESSES = 1024
"""Processes that it may start beyond those that its user runs now."""
MAX_MORE_PROCESSES_EVER = 65_536
"""The same, beyond those at its start: the most to which it can raise its own limit."""
COUNTED_EVERY_S = 5.0
MAX_OUTPUT_BYTES = 64 * 2**10
"""Most bytes printed per request, or in `COUNTED_EVERY_S` seconds."""
_CPU_SLACK_S = 10
_PR_SET_PDEATHSIG = 1


class OutputLimit:
    """Passes what scorers print to the log, at most `max_bytes` per request, and drops the rest.

    A scorer that prints without end would fill the disk that holds the log. `limited_output`
    creates the limit: it replaces standard output and error by a pipe.
    """

    def __init__(self, source: int, sink: int, max_bytes: int) -> None:
        self._source, self._sink, self._max_bytes = source, sink, max_bytes
        self._num_left = max_bytes
        self._passing = threading.Lock()

    def begin_request(self) -> None:
        """Allow `max_bytes` for the next request."""
        self._num_left = self._max_bytes

    def forward_output(self) -> None:
        """Read until all writers are gone."""
        while True:
            select.select([self._source], [], [])
            with self._passing:
                if not (chunk := os.read(self._source, _CHUNK_BYTES)):
                    return
                allowed = chunk[: self._num_left]
                if allowed and len(allowed) < len(chunk):
                    allowed += b"\n[the scorer prints more; it is dropped until the next request]\n"
                self._num_left -= min(len(chunk), self._num_left)
                _write(self._sink, allowed)

    def flush(self) -> None:
        """Wait until all output is passed on, at most `_FLUSH_S`, since it may never end."""
        limit_s = time.monotonic() + _FLUSH_S
        while time.monotonic() < limit_s:
            with self._passing:
                if not select.select([self._source], [], [], 0)[0]:
                    return
            time.sleep(_FLUSH_PAUSE_S)


@contextmanager
def limited_output(max_bytes: int) -> Iterator[OutputLimit]:
    """Limit standard output and error of this process while the block runs.

    The interpreter's report of a fatal signal goes directly to the log.
    """
    sink = os.dup(_STDERR)
    faulthandler.enable(sink)
    source, entrance = os.pipe()
    os.dup2(entrance, _STDOUT)
    os.dup2(entrance, _STDERR)
    os.close(entrance)
    limit = OutputLimit(source, sink, max_bytes)
    threading.Thread(target=limit.forward_output, name="scorer-output", daemon=True).start()
    try:
        yield limit
    finally:
        os.dup2(sink, _STDOUT)
        os.dup2(sink, _STDERR)


def _write(sink: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(sink, remaining) :]


def threads_of_user() -> int:
    """Return the number of threads of all this user's processes; 0 without /proc."""
    num_threads = 0
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                num_threads += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue
    return num_threads


class ProcessLimit:
    """Lets this process start `MAX_MORE_PROCESSES` more processes than its user has.

    The system counts the threads of the whole user, which a machine's other jobs add to, so the
    limit follows them. It does not count root's processes.

    Args:
        count: counts the user's threads; 0 if it cannot, which sets no limit.
        clock: a monotonic clock, seconds.
    """

    def __init__(
        self,
        count: Callable[[], int] = threads_of_user,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._clock = count, clock
        self._counted_at = clock()
        if num_threads := count():
            _allow(num_threads, num_threads + MAX_MORE_PROCESSES_EVER)

    def renew(self) -> None:
        """Count again, before a request, if the last count is older than `COUNTED_EVERY_S`."""
        if self._clock() - self._counted_at < COUNTED_EVERY_S:
            return
        self._counted_at = self._clock()
        if num_threads := self._count():
            _allow(num_threads)


def _allow(num_threads: int, limit: int | None = None) -> None:
    """Set the limit. The hard limit is read each time: the scorer may have lowered it."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if limit is not None:
        hard_limit = _within_limit(hard_limit, limit)
    allowed = _within_limit(hard_limit, num_threads + MAX_MORE_PROCESSES)
    resource.setrlimit(resource.RLIMIT_NPROC, (allowed, hard_limit))


def _within_limit(limit: int, value: int) -> int:
    return value if limit == resource.RLIM_INFINITY else min(limit, value)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the reward service dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)


def limit_resources(memory_bytes: int, open_files: int) -> None:
    """Limit this process's address space and open files, permanently."""
    _lower_limit(resource.RLIMIT_AS, memory_bytes)
    _lower_limit(resource.RLIMIT_NOFILE, open_files)
    _lower_limit(resource.RLIMIT_CORE, 0)


def _lower_limit(limit: int, value: int) -> None:
    value = _within_limit(resource.getrlimit(limit)[1], value)
    resource.setrlimit(limit, (value, value))


def limit_cpu(seconds: float) -> None:
    """Allow `seconds` more of CPU time, plus some slack; then SIGXCPU ends the process."""
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    allowed = _within_limit(hard_limit, int(time.process_time() + seconds) + _CPU_SLACK_S)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard_limit))
