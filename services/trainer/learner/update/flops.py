"""The share of a device's peak arithmetic that an update uses (``perf/mfu``)."""

from __future__ import annotations

from collections.abc import Container
from itertools import count

from sluice.config.memory.shape import ModelShape
from sluice.types import TrainBatch


def update_flops(shape: ModelShape, batch: TrainBatch, skipped: Container[int]) -> float:
    """Return operations of one forward and backward pass over the policy's rows of a batch.

    As packing computes it, a prompt counts once for its group. Images do not count.

    Args:
        shape: of the policy.
        batch: of all ranks.
        skipped: numbers of rows that are left out.
    """
    numbers = count()
    total = 0.0
    for group in batch.groups:
        kept = [one.num_tokens for one in group.rollouts if next(numbers) not in skipped]
        prompt, labels = int(group.prompt_token_ids.size), sum(kept)
        if labels:
            pairs = _causal(prompt) + sum(n * prompt + _causal(n) for n in kept)
            total += shape.training_flops(prompt + labels, labels, pairs)
    return total


def _causal(tokens: int) -> float:
    return tokens * (tokens + 1) / 2
