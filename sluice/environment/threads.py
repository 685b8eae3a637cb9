"""Threads that run plain methods: one after the other while they are quick, side by side once they
make others wait.

A call of its own thread costs several times what a quick method does, and most are quick.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

_PATIENCE_S = 0.005
"""A call that has waited this long gets another thread."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call; `answered` belongs to the event loop."""

    function: Callable[[], object]
    answered: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    returned: object = None
    error: BaseException | None = None


class MethodThreads:
    """Runs calls in threads, in their order. All of one event loop.

    Args:
        most: calls that run at once; further ones wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._starts = SimpleQueue[asyncio.AbstractEventLoop | None]()
        self._lock = threading.Lock()  # of all that follows
        self._waiting: deque[_Call] = deque()
        self._ended: list[_Call] = []
        self._num_threads = self._num_idle = 0  # those that make calls, and those that may
        self._is_watched = self._is_closed = False  # of the event loop alone

    async def run(self, function: Callable[[], object]) -> object:
        """Return what the function returns, or raise what it raises.

        A cancelled call ends once its thread has left the function.
        """
        if self._is_closed:
            raise RuntimeError("the threads are closed")
        call, loop = _Call(function), asyncio.get_running_loop()
        with self._lock:
            self._waiting.append(call)
            is_idle = self._num_threads == 0
        is_made = is_idle and self._add_thread(loop)
        if not (is_made or self._is_watched):
            self._is_watched = True
            loop.call_later(_PATIENCE_S, self._look, loop, call)
        try:
            await asyncio.wait([call.answered])
        except asyncio.CancelledError:
            if not self._taken_back(call):
                await _until(call.answered)
            raise
        if call.error is not None:
            raise call.error
        return call.returned

    def close(self) -> None:
        """Let running threads end with the process; take no further call."""
        with self._lock:
            self._is_closed = True
            num_idle, self._num_idle = self._num_idle, 0
        for _ in range(num_idle):
            self._starts.put(None)

    def _serve(self, loop: asyncio.AbstractEventLoop | None) -> None:
        while loop is not None and self._work(loop):
            loop = self._starts.get()

    def _work(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Make calls until none waits; return whether the thread may be needed again."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    self._num_idle += not self._is_closed
                    return not self._is_closed
                call = self._waiting.popleft()
            try:
                call.returned = call.function()
            except BaseException as error:  # noqa: BLE001  the waiter raises it
                call.error = error
            with self._lock:
                self._ended.append(call)
                is_first = len(self._ended) == 1
            if is_first:
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop has ended, and so has who waited
                    return False
            del call

    def _deliver(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for call in ended:
            call.answered.set_result(None)

    def _look(self, loop: asyncio.AbstractEventLoop, known: _Call) -> None:
        """Double the threads if a call still waits that was the last one at the look before."""
        with self._lock:
            self._is_watched = bool(self._waiting)
            if not self._waiting:
                return
            num_more = 0
            if known in self._waiting:
                num_more = min(max(1, self._num_threads), self._most - self._num_threads)
            newest = self._waiting[-1]
        for _ in range(num_more):
            if not self._add_thread(loop):
                break  # until the next look
        loop.call_later(_PATIENCE_S, self._look, loop, newest)

    def _add_thread(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Start a thread, unless the system has none now."""
        with self._lock:
            self._num_threads += 1
            has_idle = self._num_idle > 0
            self._num_idle -= has_idle
        if has_idle:
            self._starts.put(loop)
            return True
        try:
            # One that hangs need not hold the end of the process.
            threading.Thread(
                target=self._serve, args=(loop,), name="environment", daemon=True
            ).start()
        except RuntimeError:
            with self._lock:
                self._num_threads -= 1
            return False
        return True

    def _taken_back(self, call: _Call) -> bool:
        with self._lock:
            if call not in self._waiting:
                return False
            self._waiting.remove(call)
            return True


async def _until(answered: asyncio.Future[None]) -> None:
    """Wait for a cancelled call, however often it is cancelled: the next one must not overlap it,
    and it counts as running."""
    try:
        await asyncio.wait([answered])
    except asyncio.CancelledError:
        await _until(answered)
        raise
