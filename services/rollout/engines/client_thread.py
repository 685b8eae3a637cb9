"""The thread in which a vendor engine's client lives, with an event loop of its own.

Building the client takes seconds and handling its outputs takes time from every step: neither is
to hold up the service's event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from sluice.concurrency.waits import waiting_for
from sluice.errors import DeadlineError

__all__ = ["ClientThread"]

_T = TypeVar("_T")
_STOP_TIMEOUT_S = 30.0


class ClientThread:
    """Runs coroutines for the service's event loop, in which its methods are called.

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
        """Starts it; whoever starts it waits for the future, whose cancelling cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def call(self, coroutine: Coroutine[Any, Any, _T], phase: str) -> _T:
        """Its result; cancelling the call cancels it."""
        with waiting_for(self.engine, phase):
            return await asyncio.wrap_future(self.begin(coroutine))

    def to_home(self, callback: Callable[[], None]) -> None:
        """Has the service's event loop run `callback`; called in this thread."""
        try:
            self._home.call_soon_threadsafe(callback)
        except RuntimeError:
            return  # the service's event loop was closed: nobody is left to be told

    async def stop(self) -> None:
        """Ends the thread; nothing may run in it.

        Raises:
            DeadlineError: it did not end.
        """
        self._loop.call_soon_threadsafe(self._loop.stop)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError as error:
            raise DeadlineError(self.engine, "ending its thread", _STOP_TIMEOUT_S) from error
