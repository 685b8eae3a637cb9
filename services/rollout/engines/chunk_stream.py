"""The stream of token chunks from an engine to the consumer of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.rollout.engines.protocol import SampleChunk, num_tokens
from sluice.concurrency.waits import waiting_for
from sluice.errors import EngineError


def _call(callback: Callable[[], None]) -> None:
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
        self, engine: str, samples: int, to_home: Callable[[Callable[[], None]], None] = _call
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
        """Report that nothing more comes; unfinished samples fail with `error`."""
        self._to_home(lambda: self._finish(error))

    def fail(self, error: EngineError) -> None:
        """Raise `error` in the consumer, unless all samples have finished."""
        self._error = error
        self._news.set()

    @property
    def has_ended(self) -> bool:
        """Whether the engine is done with the request."""
        return self._ended.is_set()

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the consumer has not taken yet."""
        return num_tokens(self._chunks)

    async def wait_until_ended(self) -> None:
        """Wait until the engine is done with the request."""
        with waiting_for(self._engine, "aborting samples"):
            await self._ended.wait()

    async def next(self) -> tuple[SampleChunk, ...]:
        """Wait for chunks, and return all that came since the last call."""
        await self._news.wait()
        # An error stays: it may have come with the last chunks, which the consumer gets first.
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
