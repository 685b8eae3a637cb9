"""The share of a device's peak arithmetic that an update uses (``perf/mfu``)."""

from __future__ import annotations

from collections.abc import Container
from itertools import count

from sluice.algorithm.episodes import (
    follows_prompt,
    path_length,
    training_paths,
)
from sluice.config.memory.shape import ModelShape
from sluice.types import TrainBatch


def update_flops(shape: ModelShape, batch: TrainBatch, skipped: Container[int]) -> float:
    """Return operations of one forward and backward pass over the policy's rows of a batch.

    As packing computes it, a prompt counts once for its group, and tokens that an episode reads
    count in each of its paths. Images do not count.

    Args:
        shape: of the policy.
        batch: of all ranks.
        skipped: numbers of rows that are left out.
    """
    numbers = count()
    total = 0.0
    for group in batch.groups:
        kept = [one for one in group.rollouts if next(numbers) not in skipped]
        labels = sum(one.num_tokens for one in kept)
        paths = [(one.turns, path) for one in kept for path in training_paths(one.turns)]
        after = [path_length(*one) for one in paths if follows_prompt(*one)]
        alone = [path_length(*one) for one in paths if not follows_prompt(*one)]
        prompt = int(group.prompt_token_ids.size) if after else 0
        if labels:
            pairs = _causal(prompt) + sum(n * prompt for n in after)
            pairs += sum(_causal(n) for n in (*after, *alone))
            total += shape.training_flops(prompt + sum(after) + sum(alone), labels, pairs)
    return total


def _causal(tokens: int) -> float:
    return tokens * (tokens + 1) / 2
