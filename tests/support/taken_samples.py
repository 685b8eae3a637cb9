"""Train batches as trainer ranks get them: an outline for all, and the samples of one rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from services.trainer.learner.sample_reader import RewardSamples
from sluice.codec.train_batch import (
    outline_from_bytes,
    outline_to_bytes,
    sample_messages,
    with_samples,
)
from sluice.types import TrainBatch


def outline_of(batch: TrainBatch) -> TrainBatch:
    """The batch without its tokens."""
    return outline_from_bytes(outline_to_bytes(batch))


def taken(batch: TrainBatch, rows: Sequence[int]) -> TrainBatch:
    """The batch with the tokens of these samples alone."""
    return asyncio.run(
        with_samples(outline_of(batch), rows, streamed(sample_messages(batch, rows)))
    )


async def streamed(messages: Any) -> AsyncIterator[Any]:
    """The messages as a call yields them."""
    for message in messages:
        yield message


class MadeSamples(RewardSamples):
    """Samples of batches that every process can make by their id."""

    def __init__(self, make: Callable[[str], TrainBatch]) -> None:
        self.make = make

    def read(self, outline: TrainBatch, rows: Sequence[int], step: int) -> TrainBatch:
        """Return the batch with these samples."""
        return taken(self.make(outline.batch_id), rows)

    def close(self) -> None:
        """Nothing is open."""
