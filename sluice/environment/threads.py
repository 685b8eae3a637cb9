"""Threads that run plain methods. Unlike an executor's, they never hold the end of the process, and
a start that the system refuses loses no call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue

from sluice.concurrency.threads import settle

_PAUSE_S = 0.02
"""Before the system is asked again for a thread."""


class MethodThreads:
    """Runs calls in threads, begun in their order. All of one event loop.

    Args:
        most: calls that run at once; further ones wait.
    """

    def __init__(self, most: int) -> None:
        self._most, self._num_threads, self._num_calls = most, 0, 0
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
                await _until(ended)
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
        if self._num_threads >= min(self._num_calls, self._most):
            return True
        try:
            threading.Thread(target=self._serve, name="environment", daemon=True).start()
        except RuntimeError:
            return False
        self._num_threads += 1
        return True

    def _serve(self) -> None:
        while (found := self._calls.get()) is not None:
            settle(*found)
            del found


async def _until(ended: asyncio.Future[None]) -> None:
    """Wait for a cancelled call, however often it is cancelled: the next one must not overlap it,
    and it counts as running."""
    try:
        await asyncio.wait([ended])
    except asyncio.CancelledError:
        await _until(ended)
        raise
