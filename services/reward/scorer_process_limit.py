"""How many processes and threads a scorer may start, against fork bombs."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable

MAX_MORE_PROCESSES = 1024
"""More than the user has at the moment."""
MAX_MORE_PROCESSES_EVER = 65_536
"""More than the user had at the start; the scorer itself cannot raise its limit beyond."""
COUNTED_EVERY_S = 5.0


def threads_of_user() -> int:
    """Threads of all processes of this user; where there is no /proc: none."""
    found = 0
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue
    return found


class ProcessLimit:
    """Lets this process start `MAX_MORE_PROCESSES` more than its user has.

    The system counts the threads of the whole user, which a machine's other jobs add to, so the
    limit follows them. It does not count those of root.

    Args:
        count: threads of the user; 0 where they cannot be counted, which limits nothing.
        clock: seconds that only grow.
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
        """Counts anew if the last count is older than `COUNTED_EVERY_S`; before a request."""
        if self._clock() - self._counted_at < COUNTED_EVERY_S:
            return
        self._counted_at = self._clock()
        if num_threads := self._count():
            _allow(num_threads)


def _allow(num_threads: int, most: int | None = None) -> None:
    """The hard limit is read each time: the scorer may have lowered it, and none can raise it."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if most is not None:
        hard_limit = _lower(hard_limit, most)
    allowed = _lower(hard_limit, num_threads + MAX_MORE_PROCESSES)
    resource.setrlimit(resource.RLIMIT_NPROC, (allowed, hard_limit))


def _lower(limit: int, value: int) -> int:
    return value if limit == resource.RLIM_INFINITY else min(limit, value)
