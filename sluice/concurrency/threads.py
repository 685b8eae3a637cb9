"""Threads: one that owns an object and makes every call on it, one that measures what may hang, one
that writes in the background, and some that run plain methods.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from sluice.errors import DeadlineError, WeightSyncError

_T = TypeVar("_T")
_ItemT = TypeVar("_ItemT")
_log = logging.getLogger(__name__)

StopReason = Callable[[], str | None]
"""Why to stop now; ``None``: there is no reason. Called often, from several threads."""

_CHECK_EVERY_S = 0.05
_STOP_GRACE_S = 0.5
_PAUSE_S = 0.02
"""Before the system is asked again for a thread."""


class OwnerThread:
    """A daemon thread that runs calls one after the other, and that its owner can give up.

    For objects that belong to one thread, such as a process group: the current device and stream
    of CUDA and NPU belong to a thread, and collectives must be issued in one order. Constructing a
    group blocks until all members have come or its timeout has passed, and destroying one blocks
    until its pending operation has timed out (Gloo; neither `abort` nor `shutdown` shortens it).
    Such a thread is retired, and its owner continues with a new one at once.

    A process that exits while a thread is still inside torch's destructor dies with "terminate
    called". Exit therefore waits for retired threads, each no longer than `retire` announced.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
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
        """Run `call` in the thread and wait for it; raise its exception here.

        `call` should watch `stop_reason` itself. If it cannot (it is inside torch), the wait still
        ends shortly after a reason appears, and the thread stays behind.

        Raises:
            DeadlineError: `call` took longer than `timeout_s`.
            WeightSyncError: there was a reason to stop, or the thread was retired before `call`
                began.
        """
        future = self.submit(call)
        deadline = time.monotonic() + timeout_s
        while not wait([future], timeout=_CHECK_EVERY_S).done:
            if time.monotonic() > deadline:
                raise DeadlineError(peer, phase, timeout_s)
            if not self._thread.is_alive() and not future.done():
                raise WeightSyncError(peer, phase, "its thread is retired")
            if (reason := stop_reason()) and not wait([future], timeout=_STOP_GRACE_S).done:
                raise WeightSyncError(peer, phase, reason)
        return future.result()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Run `call` in the thread after those before it; return its future at once."""
        future: Future[_T] = Future()
        self._jobs.put(lambda: settle(future, call))
        return future

    async def call(self, call: Callable[[], _T]) -> _T:
        """Run `call` in the thread and await it; raise its exception here."""
        return await asyncio.wrap_future(self.submit(call))

    def retire(self, last_call: Callable[[], None], within_s: float) -> None:
        """Run `last_call` after whatever is running, then end the thread. Returns at once.

        Args:
            last_call: drops the last references to the object; may block.
            within_s: how long the thread may still take; exit waits no longer for it.
        """
        _register_exit()
        _retired[self._thread] = time.monotonic() + within_s
        self._jobs.put(last_call)
        self._jobs.put(None)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                _retired.pop(threading.current_thread(), None)
                return
            try:
                job()
            except Exception:  # noqa: BLE001 - a thread's boundary: nothing waits for the last call
                _log.warning("%s: its last call failed", self._thread.name, exc_info=True)
            # A finished job must not keep its object's memory alive while the thread is idle.
            del job


_retired: dict[threading.Thread, float] = {}
"""Ending threads, each with its deadline."""


@cache
def _register_exit() -> None:
    # At the first retirement, not at import: handlers run in reverse order, and the threads must
    # have ended before those of torch and multiprocessing take the runtime down.
    atexit.register(_join_retired_threads)


def _join_retired_threads() -> None:
    for thread, ends_s in list(_retired.items()):
        thread.join(max(0.0, ends_s - time.monotonic()))


def settle(future: Future[Any], call: Callable[[], Any]) -> None:
    """Give a future the result of `call`, or its exception, unless the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - a thread's boundary: raised in the waiter
        future.set_exception(error)


class BackgroundMeasurement(Generic[_T]):
    """A measurement that may hang, such as one of a disk, and the thread that makes it.

    Args:
        name: of the thread.
        measure: makes one measurement. After an OSError there is no result.
    """

    def __init__(self, name: str, measure: Callable[[], _T]) -> None:
        self._name = name
        self._measure = measure
        self._latest: _T | None = None
        self._thread: threading.Thread | None = None

    def latest(self, wait_s: float = 0.0) -> _T | None:
        """Start a measurement unless one is under way; return the latest result, if there is one.

        Args:
            wait_s: seconds to wait at most for the measurement.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._thread.join(wait_s)
        return self._latest

    def _run(self) -> None:
        try:
            self._latest = self._measure()
        except OSError:
            self._latest = None


class WriteError(Exception):
    """A batch could not be written, for a reason that its message explains in full."""


class BoundedWriter(Generic[_ItemT]):
    """A bounded queue, and the thread that writes its items in batches.

    `put` never waits: it drops and counts items that find no space, and logs the first one. An
    outage is logged when it begins and when it ends, once each.

    Args:
        noun: name of the items, in the plural, for the log.
        destination: where it goes, for the log.
        write: writes one batch; called in the thread. Its errors cost the batch, no more.
        max_waiting: items that may wait; with `size` the sum of their sizes. One item always may.
        batch: items of one call of `write` at most.
        interval_s: how long an item waits for others to be written with.
        break_off: called by `close` from another thread; ends a `write` that hangs.
        count: called with the number of items that were written or, negative, dropped.
        size: of an item, in the unit of `max_waiting`; ``None``: each counts as 1.
    """

    def __init__(  # noqa: PLR0913 - the bounds and callbacks by keyword
        self,
        noun: str,
        destination: str,
        write: Callable[[Sequence[_ItemT]], None],
        *,
        max_waiting: int,
        batch: int,
        interval_s: float,
        break_off: Callable[[], None] = lambda: None,
        count: Callable[[int], None] = lambda _: None,
        size: Callable[[_ItemT], int] | None = None,
    ) -> None:
        self._noun = noun
        self._destination = destination
        self._write = write
        self._max_waiting = max_waiting
        self._batch = batch
        self._interval_s = interval_s
        self._break_off = break_off
        self._count = count
        self._size = size
        self._items: deque[tuple[_ItemT, int]] = deque()
        self._lock = threading.Lock()  # over the queue and what waits in it
        self._waiting = 0
        self._wake = threading.Event()
        self._is_closing = False
        self._is_failing = False
        self._has_overflowed = False
        self.num_dropped = 0
        self.num_written = 0
        self._thread = threading.Thread(
            target=self._run, name=f"{noun} to {destination}", daemon=True
        )
        self._thread.start()

    def put(self, item: _ItemT) -> None:
        """Add one item, or drop it if the queue is full or closed. Returns at once."""
        if self._is_closing:
            self._drop(1)
            return
        size = 1 if self._size is None else self._size(item)
        with self._lock:
            num_items = len(self._items)
            has_space = not num_items or self._waiting + size <= self._max_waiting
            if has_space:
                self._items.append((item, size))
                self._waiting += size
        if not has_space:
            self._overflow()
        elif num_items + 1 == self._batch:
            self._wake.set()

    def _overflow(self) -> None:
        if not self._has_overflowed:
            self._has_overflowed = True
            _log.warning(
                "%s come faster than %s takes them, and some are dropped",
                self._noun,
                self._destination,
            )
        self._drop(1)

    def close(self, timeout_s: float, *, last_item: _ItemT | None = None) -> None:
        """Write what waits, for `timeout_s` seconds at most, and end the thread.

        `last_item` is written after all others; the bound of the queue does not hold for it.
        """
        ends_s = time.monotonic() + timeout_s
        if last_item is not None:
            with self._lock:
                self._items.append((last_item, 0))
        self._is_closing = True
        self._wake.set()
        # Half of the time: a write that hangs is broken off early enough to see it end.
        self._thread.join(timeout_s / 2)
        self._break_off()
        self._thread.join(max(0.0, ends_s - time.monotonic()))
        if self._thread.is_alive():
            _log.warning(
                "%s did not finish within %g s and is left behind", self._destination, timeout_s
            )
        if num_lost := self.num_dropped + len(self._items):
            _log.warning(
                "%d %s never reached %s, %d did",
                num_lost,
                self._noun,
                self._destination,
                self.num_written,
            )

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if not self._drain():
                return
        self._drain()

    def _drain(self) -> bool:
        """Write all items; return ``False`` to give up, after a failure while closing."""
        while self._items:
            with self._lock:
                sized_items = [
                    self._items.popleft() for _ in range(min(self._batch, len(self._items)))
                ]
                self._waiting -= sum(size for _, size in sized_items)
            batch = [item for item, _ in sized_items]
            try:
                self._write(batch)
            except Exception as error:  # noqa: BLE001 - the thread outlives whatever a write raises
                self._note_failure(batch, error)
                if self._is_closing:
                    return False
            else:
                self._note_success(batch)
        return True

    def _note_success(self, batch: Sequence[_ItemT]) -> None:
        self.num_written += len(batch)
        self._count(len(batch))
        if self._is_failing:
            self._is_failing = False
            _log.info(
                "%s reach %s again; %d were dropped",
                self._noun,
                self._destination,
                self.num_dropped,
            )

    def _note_failure(self, batch: Sequence[_ItemT], error: Exception) -> None:
        self._drop(len(batch))
        if not self._is_failing:
            is_explained = isinstance(error, WriteError)
            _log.warning(
                "%s do not reach %s and are dropped until they do: %s",
                self._noun,
                self._destination,
                error if is_explained else repr(error),
                exc_info=None if is_explained else error,
            )
        self._is_failing = True

    def _drop(self, number: int) -> None:
        with self._lock:
            self.num_dropped += number
        self._count(-number)


class MethodThreads:
    """Runs calls in threads, begun in their order. All of one event loop.

    Unlike an executor's threads, these never hold the end of the process, and a start that the
    system refuses loses no call.

    Args:
        max_threads: calls that run at once; further ones wait.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads, self._num_threads, self._num_calls = max_threads, 0, 0
        self._calls = SimpleQueue[tuple[Future[object], Callable[[], object]] | None]()
        self._is_closed = False

    async def run(self, function: Callable[[], object]) -> object:
        """Return what the function returns, or raise what it raises.

        A cancelled call ends once its thread has left the function.
        """
        if self._is_closed:
            raise RuntimeError("the threads are closed")
        call, loop = Future[object](), asyncio.get_running_loop()
        ended = loop.create_future()

        def deliver(_call: Future[object]) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nothing waits any more
                loop.call_soon_threadsafe(ended.set_result, None)

        call.add_done_callback(deliver)
        self._calls.put((call, function))
        self._num_calls += 1
        try:
            while not (ended.done() or self._has_thread()):
                await asyncio.wait([ended], timeout=_PAUSE_S)
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            if not call.cancel():
                await _wait_until_ended(ended)
            raise
        finally:
            self._num_calls -= 1
        return call.result()

    def close(self) -> None:
        """Let running threads end with the process; take no further call."""
        self._is_closed = True
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _has_thread(self) -> bool:
        """Start a thread for a call if it needs one; return False if the system refuses it."""
        if self._num_threads >= min(self._num_calls, self._max_threads):
            return True
        try:
            threading.Thread(target=self._serve, name="environment", daemon=True).start()
        except RuntimeError:
            return False
        self._num_threads += 1
        return True

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            settle(*call)
            del call


async def _wait_until_ended(ended: asyncio.Future[None]) -> None:
    """Wait for a cancelled call, however often it is cancelled: the next one must not overlap it,
    and it counts as running."""
    try:
        await asyncio.wait([ended])
    except asyncio.CancelledError:
        await _wait_until_ended(ended)
        raise
