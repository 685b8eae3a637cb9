"""The thread of a vendor's client, with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from sluice.concurrency.waits import waiting_for
from sluice.errors import DeadlineError

_T = TypeVar("_T")
_STOP_TIMEOUT_S = 30.0


class ClientThread:
    """A thread that runs coroutines for the service's event loop.

    The service's event loop calls all methods but `to_home`.

    Args:
        engine: names the engine in messages.
    """

    def __init__(self, engine: str) -> None:
        self.engine = f"{engine} engine"
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=self.engine, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            self.to_home(self._ended.set)

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine; cancelling the returned future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def call(self, coroutine: Coroutine[Any, Any, _T], phase: str) -> _T:
        """Return the coroutine's result; cancelling the call cancels the coroutine."""
        with waiting_for(self.engine, phase):
            return await asyncio.wrap_future(self.begin(coroutine))

    def to_home(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the service's event loop; called from this thread."""
        try:
            self._home.call_soon_threadsafe(callback)
        except RuntimeError:
            return  # the service's event loop is closed: nobody waits for the callback

    async def stop(self) -> None:
        """End the thread; nothing may run in it.

        Raises:
            DeadlineError: it did not end.
        """
        self._loop.call_soon_threadsafe(self._loop.stop)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError as error:
            raise DeadlineError(self.engine, "ending its thread", _STOP_TIMEOUT_S) from error
