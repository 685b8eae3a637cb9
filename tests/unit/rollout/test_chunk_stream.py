"""Chunks on their way between two event loops."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.rollout.engines.chunk_stream import ChunkStream
from services.rollout.engines.protocol import SampleChunk
from sluice.errors import EngineError
from sluice.types import FinishReason


def _chunk(reason: FinishReason | None = None) -> SampleChunk:
    return SampleChunk(0, np.array([4], np.uint32), np.array([-1.0], np.float32), 1, reason)


async def test_an_error_that_comes_with_the_last_chunks_is_raised_after_them() -> None:
    stream = ChunkStream("vLLM engine", 1)
    stream.post([_chunk()])
    stream.end(EngineError("gone"))
    async with asyncio.timeout(10):
        assert len(await stream.next()) == 1
        with pytest.raises(EngineError, match="gone"):
            await stream.next()


async def test_a_request_that_ends_without_all_samples_is_an_error() -> None:
    stream = ChunkStream("vLLM engine", 2)
    stream.post([_chunk(FinishReason.STOP)])
    stream.end(None)
    async with asyncio.timeout(10):
        await stream.next()
        with pytest.raises(EngineError, match="without all"):
            await stream.next()
