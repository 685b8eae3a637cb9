"""Threads that run plain methods: one while they are quick, more once they make others wait.

Most methods are quick, and each thread takes some of the address space that a worker may have.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_PATIENCE_S = 0.005
"""A call that has waited this long gets another thread."""

_Outcome = tuple[object, BaseException | None]
"""What a function returned or raised; a value, since no future takes every exception."""


class MethodThreads:
    """Runs calls in threads, in their order. All of one event loop.

    Args:
        most: calls that run at once; further ones wait.
    """

    def __init__(self, most: int) -> None:
        self._most, self._num_threads = most, 0
        self._queue = SimpleQueue[tuple[Future[_Outcome], Callable[[], object]] | None]()
        self._begun: deque[Future[_Outcome]] = deque()  # since nothing waited
        self._is_watched = self._is_closed = False

    async def run(self, function: Callable[[], object]) -> object:
        """Return what the function returns, or raise what it raises.

        A cancelled call ends once its thread has left the function.
        """
        if self._is_closed:
            raise RuntimeError("the threads are closed")
        call = Future[_Outcome]()
        self._begun.append(call)
        self._queue.put((call, function))
        if self._num_threads == 0:
            self._add_thread()
        if not self._is_watched:
            self._is_watched = True
            loop = asyncio.get_running_loop()
            loop.call_later(_PATIENCE_S, self._look, loop, call)
        answered = asyncio.wrap_future(call)
        try:
            await asyncio.wait([answered])
        except asyncio.CancelledError:
            if not call.cancel():  # it runs
                await _until(answered)
            raise
        returned, error = answered.result()
        if error is not None:
            raise error
        return returned

    def close(self) -> None:
        """Let running threads end with the process; take no further call."""
        self._is_closed = True
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _look(self, loop: asyncio.AbstractEventLoop, known: Future[_Outcome]) -> None:
        """Double the threads if a call still waits that was the last one at the look before."""
        while self._begun and not _waits(self._begun[0]):
            self._begun.popleft()
        self._is_watched = bool(self._begun)
        if not self._is_watched:
            return
        if _waits(known):
            for _ in range(min(max(1, self._num_threads), self._most - self._num_threads)):
                if not self._add_thread():
                    break  # until the next look
        loop.call_later(_PATIENCE_S, self._look, loop, self._begun[-1])

    def _add_thread(self) -> bool:
        """Start a thread, unless the system has none now."""
        try:
            # One that hangs need not hold the end of the process.
            threading.Thread(target=self._serve, name="environment", daemon=True).start()
        except RuntimeError:
            return False
        self._num_threads += 1
        return True

    def _serve(self) -> None:
        while (due := self._queue.get()) is not None:
            call, function = due
            if call.set_running_or_notify_cancel():
                call.set_result(_outcome(function))
            del due, call, function  # not held until the next one


def _outcome(function: Callable[[], object]) -> _Outcome:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001  the waiter raises it
        return None, error


def _waits(call: Future[_Outcome]) -> bool:
    return not call.running() and not call.done()


async def _until(answered: asyncio.Future[_Outcome]) -> None:
    """Wait for a cancelled call, however often it is cancelled: the next one must not overlap it,
    and it counts as running."""
    try:
        await asyncio.wait([answered])
    except asyncio.CancelledError:
        await _until(answered)
        raise
