"""The thread of a vendor's client with its own event loop, and the stream of chunks out of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from services.rollout.engines.protocol import SampleChunk
from sluice.concurrency.waits import waiting_for
from sluice.errors import DeadlineError, EngineError

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


class ChunkStream:
    """`post` and `end` are called in the engine's event loop, all else in the service's."""

    def __init__(self, thread: ClientThread, samples: int) -> None:
        self.open_samples = samples
        self._thread = thread
        self._chunks: list[SampleChunk] = []
        self._error: EngineError | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()

    def post(self, chunks: list[SampleChunk]) -> None:
        """Sends chunks on."""
        self._thread.to_home(lambda: self._receive(chunks))

    def end(self, error: EngineError | None) -> None:
        """Nothing more comes; unfinished samples fail with `error`."""
        self._thread.to_home(lambda: self._finish(error))

    def fail(self, error: EngineError) -> None:
        """Has whoever waits fail, unless all samples have finished."""
        self._error = error
        self._news.set()

    @property
    def has_ended(self) -> bool:
        """Whether the engine has done with the request."""
        return self._ended.is_set()

    async def wait_until_ended(self) -> None:
        """Waits for the engine to have done with the request."""
        with waiting_for(self._thread.engine, "aborting samples"):
            await self._ended.wait()

    async def next(self) -> tuple[SampleChunk, ...]:
        """What has come since the last call; waits for something to come."""
        await self._news.wait()
        if self._error is None:  # which comes with the last chunks, or by itself
            self._news.clear()
        chunks, self._chunks = tuple(self._chunks), []
        if self._error is not None and self.open_samples and not chunks:
            raise self._error
        return chunks

    def _receive(self, chunks: list[SampleChunk]) -> None:
        self._chunks.extend(chunks)
        self.open_samples -= sum(chunk.finish_reason is not None for chunk in chunks)
        self._news.set()

    def _finish(self, error: EngineError | None) -> None:
        self._ended.set()
        if self.open_samples:
            self.fail(
                error or EngineError(f"{self._thread.engine}: ended without all of the samples")
            )
