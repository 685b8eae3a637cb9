"""Made-up episodes: groups whose samples have several turns, and the sequence of each turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sluice.types import (
    FinishReason,
    Rollout,
    TokenIds,
    TrainBatch,
    TrainGroup,
    Turn,
    VersionSpan,
)
from tests.support.tiny_policy import VOCABULARY, make_batch, make_group


@dataclass(frozen=True)
class Shape:
    """A turn to make up: how many tokens it reads and samples, and what it continues."""

    context: int
    tokens: int
    parent: int | None = None
    is_new_root: bool = False
    reward: float | None = None


LINEAR = (Shape(0, 3), Shape(2, 2, 0), Shape(1, 4, 1))
TREE = (
    Shape(0, 2),
    Shape(2, 2, 0),
    Shape(1, 3, 1),
    Shape(3, 1, 1),
    Shape(1, 2, 0),
    Shape(5, 3, is_new_root=True),
)
COMPACTED = (
    Shape(0, 2),
    Shape(2, 3, 0),
    Shape(2, 0, 1),
    Shape(2, 3, 1),
    Shape(6, 4, is_new_root=True),
)
"""Segments: before the compaction, a turn without tokens, the summary, and what follows it."""
READS_FIRST = (Shape(3, 2), Shape(1, 1, 0))
NO_TOKENS = (Shape(0, 0), Shape(1, 0, 0))


def make_turns(random: np.random.Generator, shapes: Sequence[Shape]) -> tuple[Turn, ...]:
    """Turns of random tokens."""
    return tuple(
        Turn(
            random.integers(VOCABULARY, size=shape.tokens).astype(np.uint32),
            -4.0 - random.random(shape.tokens).astype(np.float32),
            (VersionSpan(0, 0, shape.tokens),) if shape.tokens else (),
            FinishReason.STOP,
            "",
            parent=shape.parent,
            context=random.integers(VOCABULARY, size=shape.context).astype(np.uint32),
            is_new_root=shape.is_new_root,
            reward=shape.reward,
        )
        for shape in shapes
    )


def make_episodes(seed: int, episodes: Sequence[Sequence[Shape]]) -> TrainGroup:
    """A prompt with these episodes, of mixed rewards."""
    random = np.random.default_rng([seed, 1])
    group = make_group(seed, (1,) * max(2, len(episodes)))
    rollouts = tuple(Rollout(i, make_turns(random, one)) for i, one in enumerate(episodes))
    return replace(group, rollouts=rollouts, scores=group.scores[: len(rollouts)])


def make_episode_batch() -> TrainBatch:
    """Six groups of four samples: episodes and plain answers."""
    batch = make_batch()
    episodes = (
        make_episodes(10, (LINEAR, TREE, COMPACTED, READS_FIRST)),
        make_episodes(11, (TREE, NO_TOKENS, LINEAR, LINEAR)),
        make_episodes(12, (COMPACTED, COMPACTED, READS_FIRST, TREE)),
    )
    return replace(batch, groups=(*batch.groups[:2], *episodes, batch.groups[5]))


def sequence_before(prompt: TokenIds, turns: Sequence[Turn], number: int) -> TokenIds:
    """What the policy read before it sampled the first token of a turn."""
    turn = turns[number]
    if turn.parent is not None:
        parent = turns[turn.parent]
        before = [sequence_before(prompt, turns, turn.parent), parent.token_ids]
    else:
        before = [] if turn.is_new_root else [prompt]
    return np.concatenate([*before, turn.context])
