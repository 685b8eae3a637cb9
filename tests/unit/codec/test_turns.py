"""Train batches with episodes on their way to a trainer rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sluice.api.common.v1 import common_pb2 as common
from sluice.codec.rollout import rollout_outline_from_proto, rollout_outline_to_proto
from sluice.codec.train_batch import outline_to_proto, sample_messages, with_samples
from sluice.errors import InvalidRequestError
from sluice.types import Rollout, Turn, is_absent
from tests.support.episodes import (
    COMPACTED,
    READS_FIRST,
    TREE,
    Shape,
    make_episode_batch,
    make_turns,
)
from tests.support.taken_samples import outline_of, streamed, taken
from tests.support.tiny_policy import make_batch

OWN = (1, 8, 9, 10, 14, 20)
REWARDED = (Shape(0, 2, reward=0.5), Shape(1, 0, 0), Shape(2, 3, 1, reward=-1.0))


def lengths(turn: Turn) -> tuple[object, ...]:
    return (
        *(turn.token_ids.size, turn.context.size, turn.parent, turn.is_new_root, turn.reward),
        *(turn.finish_reason, turn.version_spans),
    )


@pytest.mark.parametrize("shapes", [TREE, COMPACTED, READS_FIRST, REWARDED])
def test_an_outline_has_the_turns_without_their_tokens(shapes: tuple[Shape, ...]) -> None:
    rollout = Rollout(3, make_turns(np.random.default_rng(0), shapes))
    found = rollout_outline_from_proto(rollout_outline_to_proto(rollout))
    assert list(map(lengths, found.turns)) == list(map(lengths, rollout.turns))
    assert found.num_tokens == rollout.num_tokens
    assert is_absent(found.token_ids)
    assert np.isnan(found.behavior_logprobs).all()
    assert all(is_absent(turn.context) for turn in found.turns if turn.context.size)


def test_a_rank_gets_the_turns_of_its_samples_and_no_others() -> None:
    batch = make_episode_batch()
    found = taken(batch, OWN)
    sent = [one for group in batch.groups for one in group.rollouts]
    came = [one for group in found.groups for one in group.rollouts]
    for row, (expected, one) in enumerate(zip(sent, came, strict=True)):
        assert list(map(lengths, one.turns)) == list(map(lengths, expected.turns))
        if row not in OWN:
            assert is_absent(one.token_ids) or not one.num_tokens
            continue
        for mine, theirs in zip(one.turns, expected.turns, strict=True):
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(mine.context, theirs.context)
            np.testing.assert_array_equal(mine.behavior_logprobs, theirs.behavior_logprobs)


def test_answers_travel_without_turns() -> None:
    batch = make_batch()
    outline = outline_to_proto(batch)
    assert not any(rollout.turns for group in outline.groups for rollout in group.rollouts)
    samples = [m.sample for m in sample_messages(batch, range(24)) if m.HasField("sample")]
    assert not any(sample.context_token_ids_u32 for sample in samples)


def renew(message: common.Rollout) -> None:
    message.turns[1].is_new_root = True


def renew_without_reading(message: common.Rollout) -> None:
    message.turns[0].is_new_root = True


def lose_tokens(message: common.Rollout) -> None:
    message.turns[2].num_tokens -= 1


def continue_later(message: common.Rollout) -> None:
    message.turns[1].parent = 1


def spoil_reward(message: common.Rollout) -> None:
    message.turns[0].reward = math.nan


def reward_too_much(message: common.Rollout) -> None:
    message.turns[0].reward = 1e39


def end_strangely(message: common.Rollout) -> None:
    message.turns[0].finish_reason = 9  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renew, "sample 3, turn 1: is_new_root, but it continues another"),
        (renew_without_reading, "sample 3, turn 0: is_new_root, but it has read nothing"),
        (lose_tokens, "sample 3: 9 tokens of turns for the 10 it has"),
        (continue_later, "turn 1 continues turn 1, which is not before it"),
        (spoil_reward, "sample 3, turn 0: its reward is nan"),
        (reward_too_much, r"sample 3, turn 0: its reward is 1e\+39"),
        (end_strangely, "sample 3, turn 0, finish_reason: 9 is unknown"),
    ],
)
def test_turns_that_do_not_fit_are_refused(
    change: Callable[[common.Rollout], None], message: str
) -> None:
    turns = make_turns(np.random.default_rng(0), TREE[:5])
    sent = rollout_outline_to_proto(Rollout(3, turns))
    change(sent)
    with pytest.raises(InvalidRequestError, match=message):
        rollout_outline_from_proto(sent)


async def test_read_tokens_that_are_missing_are_refused() -> None:
    batch = make_episode_batch()
    messages: list[Any] = list(sample_messages(batch, (9,)))
    messages[-1].sample.context_token_ids_u32 = b"\0" * 8
    with pytest.raises(InvalidRequestError, match="2 read tokens came for the 12 it has"):
        await with_samples(outline_of(batch), (9,), streamed(messages))
