"""A group's samples are the same however their tokens are cut, sent, lost and continued."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.generation.request import (
    GenerateEvent,
    GroupProgress,
    GroupRequest,
    Purpose,
)
from services.reward.generation.stream import CollectedSamples
from sluice.algorithm.growing_sample import GrowingSample, NewTokens
from sluice.errors import PeerError
from sluice.types import ChatMessage, FinishReason, Prompt, PromptOrigin, Rollout, SamplingParams

SAMPLES, LOWEST = 3, 5
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=99, seed=0)
PROMPT = Prompt("p", 0, (ChatMessage("user", "?"),), "s", "1", PromptOrigin.CLIENT, None)
REQUEST = GroupRequest(PROMPT, tuple(range(SAMPLES)), SAMPLING, Purpose.TRAINING, LOWEST)


def tokens(index: int, start: int, end: int, version: int) -> NewTokens:
    """Places [start, end) of a sample, which are the same from any replica."""
    places = np.arange(start, end)
    ids = (1000 * index + places).astype(np.uint32)
    return NewTokens(index, ids, -places.astype(np.float32), version)


class Replica:
    """Draws samples of given lengths, some from partials on, and cuts them when asked."""

    def __init__(self, sizes: list[int], version: int, partials: list[Rollout]) -> None:
        self.sizes, self.version = sizes, version
        self.grown = {index: GrowingSample() for index in range(SAMPLES)}
        for partial in partials:
            self.grown[partial.sample_index].adopt(partial)

    def draw(self, index: int, count: int) -> NewTokens:
        start = self.grown[index].num_tokens
        new = tokens(index, start, min(start + count, self.sizes[index]), self.version)
        self.grown[index].append(new.token_ids, new.behavior_logprobs, new.version)
        return new

    def whole(self, index: int, reason: FinishReason) -> Rollout:
        if reason is FinishReason.STOP:
            self.draw(index, self.sizes[index])
        return self.grown[index].rollout(index, reason, "text")


PROMPT_TOKENS = np.zeros(1, np.uint32)
STARTED = GenerateEvent((PROMPT_TOKENS, LOWEST), ())

steps = st.lists(
    st.tuples(
        st.integers(0, SAMPLES - 1),
        st.integers(0, 4),
        st.sampled_from(["delta", "delta", "whole", "aborted", "stream lost"]),
        st.integers(LOWEST - 1, LOWEST + 2),
    ),
    max_size=30,
)


@given(st.lists(st.integers(1, 12), min_size=SAMPLES, max_size=SAMPLES), steps)
def test_any_way_home_gives_the_same_samples_and_counts_each_token_once(
    sizes: list[int], happenings: list[tuple[int, int, str, int]]
) -> None:
    counts, received = GroupProgress(), 0
    group = CollectedSamples(replace(REQUEST, progress=counts))

    def begin(version: int) -> Replica:
        partials = list(group.partials())
        assert all(v.version >= LOWEST for p in partials for v in p.version_spans)
        group.note_requested(f"replica {version}")
        arrive(STARTED)
        return Replica(sizes, version, partials)

    def arrive(event: GenerateEvent) -> int:
        return sum(group.take(event, 0.0).values())

    replica = begin(LOWEST)
    for index, count, what, version in happenings:
        if what == "stream lost":
            replica = begin(version)
        elif index not in group.missing:
            continue
        elif what == "delta":
            received += arrive(GenerateEvent(None, (), (replica.draw(index, count),)))
        else:
            reason = FinishReason.STOP if what == "whole" else FinishReason.ABORTED
            received += arrive(GenerateEvent(None, (replica.whole(index, reason),)))
    replica = begin(LOWEST)
    rest = tuple(replica.whole(index, FinishReason.STOP) for index in group.missing)
    received += arrive(GenerateEvent(None, rest))
    for rollout in group.group().rollouts:
        expected = tokens(rollout.sample_index, 0, sizes[rollout.sample_index], 0)
        assert rollout.token_ids.tolist() == expected.token_ids.tolist()
        assert rollout.behavior_logprobs.tolist() == expected.behavior_logprobs.tolist()
        assert rollout.finish_reason is FinishReason.STOP
    assert counts.num_received == received
    assert counts.num_requested == SAMPLES
    assert group.num_tokens == sum(sizes)
    assert counts.num_received - counts.num_thrown_away == sum(sizes)


def test_a_group_ended_early_holds_what_came_of_each_sample() -> None:
    group = CollectedSamples(replace(REQUEST, progress=GroupProgress()))
    group.take(STARTED, 0.0)
    replica = Replica([4, 4, 4], LOWEST, [])
    group.take(GenerateEvent(None, (), (replica.draw(1, 3),)), 0.0)
    group.take(GenerateEvent(None, (replica.whole(0, FinishReason.STOP),)), 0.0)
    group.end_unfinished()
    rollouts = group.group().rollouts
    assert [rollout.num_tokens for rollout in rollouts] == [4, 3, 0]
    assert [rollout.finish_reason for rollout in rollouts] == ["stop", "aborted", "aborted"]
    assert group.missing == ()


def test_what_a_defective_replica_sent_was_received_and_thrown_away() -> None:
    counts = GroupProgress()
    group = CollectedSamples(replace(REQUEST, progress=counts))
    group.take(STARTED, 0.0)
    group.take(GenerateEvent(None, (), (tokens(0, 0, 3, LOWEST),)), 0.0)
    other = Replica([9, 9, 5], LOWEST, []).whole(2, FinishReason.STOP)
    unlike = replace(other, sample_index=0)
    with pytest.raises(PeerError, match="5 tokens that do not continue the 3 that came before"):
        group.take(GenerateEvent(None, (unlike,)), 0.0)
    assert (counts.num_received, counts.num_thrown_away, group.num_tokens) == (5, 5, 0)
    with pytest.raises(PeerError, match="sample 7 was not asked for"):
        group.take(GenerateEvent(None, (), (tokens(7, 0, 2, LOWEST),)), 0.0)
    assert counts.num_received == 7


def test_each_stream_names_the_prompts_tokens_before_its_samples() -> None:
    group = CollectedSamples(replace(REQUEST, progress=GroupProgress()))
    group.note_requested("a")
    group.take(STARTED, 0.0)
    group.take(GenerateEvent(None, (), (tokens(0, 0, 1, LOWEST),)), 0.0)
    group.note_requested("b")
    with pytest.raises(PeerError, match="sent samples before the prompt's tokens"):
        group.take(GenerateEvent(None, (), (tokens(0, 1, 1, LOWEST),)), 0.0)
