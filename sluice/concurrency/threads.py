"""A thread that makes every call on one object, and that can be given up.

Why a thread of its own for each group:

* the current device and stream of CUDA and NPU belong to a thread, and collectives must be
  issued in one order;
* constructing a group blocks until all members came or its timeout passed, and destroying one
  blocks until its pending operation timed out (Gloo; neither `abort` nor `shutdown` shortens
  it). Such a thread is left to itself, and its caller goes on with a new group at once.

A process that exits while such a thread is still inside torch's destructor dies with "terminate
called". Retired threads are therefore waited for at exit, each no longer than announced.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from sluice.errors import DeadlineError, WeightSyncError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

StopReason = Callable[[], str | None]
"""Why to stop now; ``None`` means go on. Asked often, from several threads."""

_CHECK_EVERY_S = 0.05
_STOP_GRACE_S = 0.5


class OwnerThread:
    """Runs calls one after the other in a daemon thread of the given name."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(
        self,
        call: Callable[[], _T],
        *,
        timeout_s: float,
        stop_reason: StopReason,
        peer: str,
        phase: str,
    ) -> _T:
        """Run `call` in the thread and wait for it; its exception is raised here.

        `call` should watch `stop_reason` itself; if it cannot (it is inside torch), the wait ends
        shortly after a reason appears all the same, and the thread stays behind.

        Raises:
            DeadlineError: `call` took longer than `timeout_s`.
            WeightSyncError: there was a reason to stop, or the thread was retired before `call`
                began.
        """
        future: Future[_T] = Future()
        self._jobs.put(lambda: _settle(future, call))
        deadline = time.monotonic() + timeout_s
        while not wait([future], timeout=_CHECK_EVERY_S).done:
            if time.monotonic() > deadline:
                raise DeadlineError(peer, phase, timeout_s)
            if not self._thread.is_alive() and not future.done():
                raise WeightSyncError(peer, phase, "its group's thread is retired")
            if (reason := stop_reason()) and not wait([future], timeout=_STOP_GRACE_S).done:
                raise WeightSyncError(peer, phase, reason)
        return future.result()

    def retire(self, last_call: Callable[[], None], within_s: float) -> None:
        """Run `last_call` after whatever is running, then end the thread. Returns at once.

        Args:
            last_call: drops the last references to the group; may block.
            within_s: how long the thread may still take; exit waits no longer for it.
        """
        _retired.add(self._thread, within_s)
        self._jobs.put(last_call)
        self._jobs.put(None)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                _retired.discard(threading.current_thread())
                return
            try:
                job()
            except Exception:  # noqa: BLE001 - a thread's boundary: nobody awaits the last call
                _log.warning("%s: the last call failed", self._thread.name, exc_info=True)
            # A finished job must not keep its group's buffers alive while the thread is idle.
            del job


def wait_for_retired_threads(timeout_s: float) -> int:
    """Wait until retired threads ended; returns how many did not. 0 means exit is safe.

    A service that must leave now and gets another number ends by `os._exit`.
    """
    return _retired.wait(timeout_s)


class _RetiredThreads:
    """Threads on their way out, with the time by which each must be gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[threading.Thread, float] = {}
        self._registered = False

    def add(self, thread: threading.Thread, within_s: float) -> None:
        with self._lock:
            self._deadlines[thread] = time.monotonic() + within_s
            if not self._registered:
                atexit.register(self._wait_at_exit)
                self._registered = True

    def discard(self, thread: threading.Thread) -> None:
        with self._lock, contextlib.suppress(KeyError):
            del self._deadlines[thread]

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        for thread in self._snapshot():
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._snapshot())

    def _wait_at_exit(self) -> None:
        for thread, deadline in self._snapshot().items():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _snapshot(self) -> dict[threading.Thread, float]:
        with self._lock:
            return dict(self._deadlines)


_retired = _RetiredThreads()


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - a thread's boundary: raised in the waiter
        future.set_exception(error)
