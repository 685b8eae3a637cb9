"""The thread that an engine computes in, the stream of its chunks to the event loop, and the turn
to decode images.
"""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from services.rollout.engines.protocol import SampleChunk
from sluice.concurrency.waits import deadline, waiting_for
from sluice.errors import EngineError

_T = TypeVar("_T")
_STOP_TIMEOUT_S = 30.0
_Callback = Callable[[], object]


class LoopThread:
    """A thread with its own event loop, which runs coroutines for the service's event loop.

    `sluice.concurrency.threads.OwnerThread` runs calls one by one. Here work overlaps: samples,
    liveness checks and updates of an engine run concurrently, and the clients of vLLM and SGLang
    are asynchronous.

    The service's event loop calls all methods except `call_in_service_loop`.

    Args:
        engine: names the engine in messages.
    """

    def __init__(self, engine: str) -> None:
        self.engine = f"{engine} engine"
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._for_home: list[_Callback] = []
        self._thread = threading.Thread(target=self._run, name=self.engine, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            self._for_home.append(self._ended.set)
            self._hand_over()

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine; cancelling the returned future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def call(
        self, coroutine: Coroutine[Any, Any, _T], phase: str, peer: str | None = None
    ) -> _T:
        """Return the coroutine's result; cancelling the call cancels the coroutine.

        Args:
            phase: what the caller waits for, as shown among waits.
            peer: the peer it waits for; by default the engine.
        """
        with waiting_for(peer or self.engine, phase):
            return await asyncio.wrap_future(self.begin(coroutine))

    def call_in_service_loop(self, callback: _Callback) -> None:
        """Run `callback` in the service's event loop; called from this thread.

        Callbacks of one turn of this thread's loop are sent together, since waking the other loop
        costs more than a callback.
        """
        self._for_home.append(callback)
        if len(self._for_home) == 1:
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        callbacks, self._for_home = self._for_home, []
        try:
            self._home.call_soon_threadsafe(_run_all, callbacks)
        except RuntimeError:
            return  # the service's event loop is closed: nothing waits for the callbacks

    async def stop(self) -> None:
        """End the thread, in which nothing may be running.

        Raises:
            DeadlineError: it did not end.
        """
        self._loop.call_soon_threadsafe(self._loop.stop)
        async with deadline(_STOP_TIMEOUT_S, peer=self.engine, phase="ending its thread"):
            await self._ended.wait()


def _run_all(callbacks: list[_Callback]) -> None:
    for callback in callbacks:
        callback()


class ChunkStream:
    """Chunks of one request on their way to its consumer.

    The engine calls `post` and `end`; everything else belongs to the consumer's event loop.

    Args:
        engine: names the engine in messages.
        samples: number of samples in the request.
        to_home: runs a callback in the consumer's event loop; by default it calls it at once, for
            engines that post from that loop.
    """

    def __init__(
        self, engine: str, samples: int, to_home: Callable[[_Callback], object] = operator.call
    ) -> None:
        self.open_samples = samples
        self._engine = engine
        self._to_home = to_home
        self._chunks: list[SampleChunk] = []
        self._error: EngineError | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()

    def post(self, chunks: list[SampleChunk]) -> None:
        """Send chunks to the consumer."""
        self._to_home(lambda: self._receive(chunks))

    def end(self, error: EngineError | None) -> None:
        """End the stream; unfinished samples fail with `error`."""
        self._to_home(lambda: self._finish(error))

    def fail(self, error: EngineError) -> None:
        """Raise `error` in the consumer, unless all samples have finished."""
        self._error = error
        self._news.set()

    @property
    def has_ended(self) -> bool:
        """Whether the engine is done with the request."""
        return self._ended.is_set()

    async def wait_until_ended(self) -> None:
        """Wait until the engine is done with the request."""
        with waiting_for(self._engine, "aborting samples"):
            await self._ended.wait()

    async def next(self) -> tuple[SampleChunk, ...]:
        """Wait for chunks, and return all since the last call."""
        await self._news.wait()
        # Keep an error: the consumer first gets chunks that arrived with it.
        if self._error is None:
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
            self.fail(error or EngineError(f"{self._engine}: ended without all of the samples"))


class ImageTurn:
    """The turn to decode a prompt's images; used in one event loop.

    Attributes:
        samples: number of samples whose images are being decoded or wait.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._turn = asyncio.Semaphore(1)

    async def read(self, samples: int, decode: Callable[[], _T]) -> _T:
        """Run `decode` in a thread as soon as no other decoder runs; return its result.

        A thread cannot be interrupted. So a cancelled caller keeps its turn until its thread has
        ended, and callers that come and leave never have two decoders at work.

        Args:
            samples: number of the prompt's samples.
            decode: called in a thread, so neither the event loop nor the step loop waits.
        """
        self.samples += samples
        try:
            with waiting_for("image decoder", "decoding a prompt's images"):
                await self._turn.acquire()
                decoding = asyncio.get_running_loop().run_in_executor(None, decode)
                decoding.add_done_callback(self._has_ended)
                return await asyncio.shield(decoding)
        finally:
            self.samples -= samples

    def _has_ended(self, decoding: asyncio.Future[_T]) -> None:
        self._turn.release()
        if not decoding.cancelled():
            decoding.exception()  # the caller was cancelled: read the error, or asyncio warns
