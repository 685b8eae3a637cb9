"""Chunks of one request on their way from the engine's event loop to the service's."""

from __future__ import annotations

import asyncio

from services.rollout.engines.client_thread import ClientThread
from services.rollout.engines.protocol import SampleChunk
from sluice.concurrency.waits import waiting_for
from sluice.errors import EngineError

__all__ = ["ChunkStream"]


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
