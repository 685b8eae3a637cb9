"""Refused train batches, and the problems that the refusals name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.loop.batch_check import BatchTerms, check_batch
from sluice.errors import PeerError
from sluice.types import (
    DataProgress,
    FinishReason,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
)

TERMS = BatchTerms(num_groups=2, samples_per_group=4, max_staleness=2)
STEP = 6  # updates version 5


def rollout(index: int, *versions: int, logprob: float = -1.0) -> Rollout:
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
    logprobs = np.full(len(versions), logprob, np.float32)
    tokens = np.zeros(len(versions), np.uint32)
    return Rollout.of_one_turn(index, tokens, logprobs, spans, FinishReason.STOP, "")


def group(name: str, *rollouts: Rollout, reward: float = 1.0) -> TrainGroup:
    scores = tuple(Scored(reward, reward, {}) for _ in rollouts)
    return TrainGroup(name, np.zeros(3, np.uint32), rollouts, scores, "s")


def batch(*groups: TrainGroup, version: int = 5) -> TrainBatch:
    return TrainBatch("b-1", version, groups, DataProgress(8), {})


def good(name: str) -> TrainGroup:
    return group(name, *(rollout(i, 4, 5) for i in range(4)))


def with_sample(sample: Rollout) -> TrainBatch:
    return batch(good("p"), group("q", rollout(0, 5), sample, rollout(2, 5)))


REFUSED: dict[str, tuple[Callable[[], TrainBatch], str]] = {
    "another version": (
        lambda: batch(good("p"), good("q"), version=4),
        "formed for version 4, but version 5 is updated",
    ),
    "too few groups": (lambda: batch(good("p")), "1 groups instead of 2"),
    "a group twice": (lambda: batch(good("p"), good("p")), "group p: it is in the batch twice"),
    "too few samples": (
        lambda: batch(good("p"), group("q", rollout(0, 5))),
        "group q: 1 samples, expected 2..4",
    ),
    "too many samples": (
        lambda: batch(good("p"), group("q", *(rollout(i, 5) for i in range(5)))),
        "group q: 5 samples, expected 2..4",
    ),
    "a sample twice": (
        lambda: batch(good("p"), group("q", rollout(0, 5), rollout(0, 5))),
        r"group q: sample indices \[0, 0\] repeat",
    ),
    "a score missing": (
        lambda: batch(good("p"), replace(good("q"), scores=(Scored(1, 1, {}),))),
        "group q: 1 scores for 4 samples",
    ),
    "no prompt": (
        lambda: batch(good("p"), replace(good("q"), prompt_token_ids=np.zeros(0, np.uint32))),
        "group q: the prompt holds no tokens",
    ),
    "too stale": (
        lambda: with_sample(rollout(1, 2, 5)),
        "group q, sample 1: tokens of version 2 are 3 versions behind version 5, "
        "sluice.asynchrony.max_staleness allows 2",
    ),
    "of the future": (
        lambda: with_sample(rollout(1, 5, 6)),
        "group q, sample 1: tokens of version 6, but version 5 is the newest there is",
    ),
    "a baseline that is no number": (
        lambda: batch(good("p"), replace(good("q"), baseline_reward=float("nan"))),
        "group q: its baseline_reward is nan",
    ),
    "a baseline that float32 cannot hold": (
        lambda: batch(good("p"), replace(good("q"), baseline_reward=-1e39)),
        r"group q: its baseline_reward is -1e\+39",
    ),
    "a reward that float32 cannot hold": (
        lambda: batch(good("p"), group("q", rollout(0, 5), rollout(1, 5), reward=1e39)),
        r"group q, sample 0: its reward is 1e\+39",
    ),
    "no reward": (
        lambda: batch(good("p"), group("q", rollout(0, 5), rollout(1, 5), reward=float("nan"))),
        "group q, sample 0: its reward is nan",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_against_the_terms_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(PeerError, match=f"batch of step 6: batch b-1, {message}; .* not trained"):
        check_batch(make(), TERMS, STEP)


def test_a_batch_within_the_terms_is_taken() -> None:
    check_batch(batch(good("p"), good("q")), TERMS, STEP)


def test_a_group_may_have_lost_samples_and_a_response_may_be_empty() -> None:
    check_batch(with_sample(rollout(1)), TERMS, STEP)


def test_a_group_of_one_sample_is_whole_if_one_is_sampled() -> None:
    alone = group("p", rollout(0, 5))
    check_batch(batch(alone), BatchTerms(1, samples_per_group=1, max_staleness=0), STEP)


def test_a_loss_over_whole_groups_refuses_one_that_lost_a_sample() -> None:
    terms = replace(TERMS, whole_groups=True)
    check_batch(batch(good("p"), good("q")), terms, STEP)
    lost = group("q", *(rollout(i, 5) for i in range(3)))
    with pytest.raises(PeerError, match=r"batch b-1, group q: 3 samples, expected 4\.\.4"):
        check_batch(batch(good("p"), lost), terms, STEP)


def test_a_run_that_wants_most_of_a_group_refuses_half_of_one() -> None:
    half = batch(good("p"), group("q", rollout(0, 5), rollout(1, 5)))
    check_batch(half, TERMS, STEP)
    with pytest.raises(PeerError, match=r"batch b-1, group q: 2 samples, expected 3\.\.4"):
        check_batch(half, replace(TERMS, min_share=0.75), STEP)


def test_an_estimator_with_baselines_refuses_a_group_without_one() -> None:
    terms = replace(TERMS, with_baselines=True)
    given = [replace(good(name), baseline_reward=0.0) for name in ("p", "q")]
    check_batch(batch(*given), terms, STEP)
    with pytest.raises(PeerError, match="batch b-1, group q: it has no baseline_reward"):
        check_batch(batch(given[0], good("q")), terms, STEP)


@given(versions=st.lists(st.integers(0, 8), min_size=1, max_size=6), bound=st.integers(0, 5))
def test_a_sample_is_trained_if_and_only_if_all_its_versions_are_within_the_bound(
    versions: list[int], bound: int
) -> None:
    terms = replace(TERMS, num_groups=1, max_staleness=bound)
    sampled = batch(group("p", rollout(0, 5), rollout(1, *versions)))
    try:
        check_batch(sampled, terms, STEP)
    except PeerError:
        assert not all(5 - bound <= version <= 5 for version in versions)
    else:
        assert all(5 - bound <= version <= 5 for version in versions)
