"""Which groups carry a gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.groups.filter import filter_scores, filter_values
from sluice.errors import ConfigError, DataError
from sluice.types import (
    Failed,
    FailureKind,
    FinishReason,
    GradedGroup,
    Outcome,
    Prompt,
    PromptEnd,
    PromptOrigin,
    Rollout,
    RolloutGroup,
    Scored,
)


def scored(score: float, penalty: float = 0.0, **metrics: float) -> Scored:
    return Scored(score=score, reward=score + penalty, metrics=metrics)


def graded(*outcomes: Outcome) -> GradedGroup:
    prompt = Prompt("p", 0, (), "math_dapo", "34", PromptOrigin.DATASET, 0)
    empty = (np.array([], dtype=np.uint32), np.array([], dtype=np.float32))
    rollouts = tuple(
        Rollout.of_one_turn(i, *empty, (), FinishReason.STOP, "") for i in range(len(outcomes))
    )
    return GradedGroup(RolloutGroup(prompt, np.array([1], dtype=np.uint32), rollouts), outcomes)


def test_a_group_of_mixed_accuracy_is_kept() -> None:
    assert filter_scores([scored(1.0, acc=1.0), scored(-1.0, acc=0.0)], metric="acc") is None


@pytest.mark.parametrize(
    ("scores", "end"),
    [
        ([scored(1.0, acc=1.0)] * 3, PromptEnd.FILTERED_ALL_RIGHT),
        ([scored(-1.0, acc=0.0)] * 3, PromptEnd.FILTERED_ALL_WRONG),
        ([scored(0.9, acc=0.9)] * 3, PromptEnd.FILTERED_UNIFORM),
    ],
)
def test_a_uniform_group_ends_by_its_accuracy(scores: list[Scored], end: PromptEnd) -> None:
    assert filter_scores(scores, metric="acc") is end


@pytest.mark.parametrize(
    ("score", "end"),
    [
        (1.0, PromptEnd.FILTERED_ALL_RIGHT),
        (0.0, PromptEnd.FILTERED_ALL_WRONG),
        (-1.0, PromptEnd.FILTERED_ALL_WRONG),
        (0.1, PromptEnd.FILTERED_UNIFORM),
    ],
)
def test_without_accuracy_the_score_says_right_or_wrong(score: float, end: PromptEnd) -> None:
    assert filter_scores([scored(score), scored(score)], metric="score") is end


def test_a_uniform_metric_over_mixed_accuracy_is_neither_right_nor_wrong() -> None:
    scores = [scored(1.0, acc=1.0, style=2.0), scored(-1.0, acc=0.0, style=2.0)]
    assert filter_scores(scores, metric="style") is PromptEnd.FILTERED_UNIFORM


def test_a_group_of_one_is_kept() -> None:
    assert filter_scores([scored(1.0, acc=1.0)], metric="acc") is None


def test_a_filter_that_is_off_keeps_everything() -> None:
    assert filter_scores([scored(1.0)] * 4, metric=None) is None


@pytest.mark.parametrize("metric", ["reward", "seq_reward", "seq_final_reward"])
def test_a_group_that_differs_by_its_penalty_only_is_kept_by_reward(metric: str) -> None:
    scores = [scored(1.0, acc=1.0), scored(1.0, penalty=-0.5, acc=1.0)]
    assert filter_scores(scores, metric=metric) is None


def test_rewards_that_the_trainer_cannot_tell_apart_are_uniform() -> None:
    rewards = [scored(0.1 + 0.2), scored(0.3)]
    assert filter_scores(rewards, metric="reward") is PromptEnd.FILTERED_UNIFORM
    assert filter_scores(rewards, metric="score") is None


@pytest.mark.parametrize("metric", ["acc", "score"])
def test_a_group_that_differs_by_its_penalty_only_is_filtered_by_grade(metric: str) -> None:
    scores = [scored(1.0, acc=1.0), scored(1.0, penalty=-0.5, acc=1.0)]
    assert filter_scores(scores, metric=metric) is PromptEnd.FILTERED_ALL_RIGHT


def test_a_missing_metric_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'accuracy'.*acc, reward, score, seq_final"):
        filter_scores([scored(1.0, acc=1.0)], metric="accuracy")


def test_a_metric_that_is_no_number_is_refused() -> None:
    with pytest.raises(DataError, match="'acc' of a sample is nan"):
        filter_scores([scored(1.0, acc=math.nan), scored(1.0, acc=1.0)], metric="acc")


def test_only_scored_samples_count() -> None:
    failed = Failed(FailureKind.SCORER_TIMEOUT, "5 s")
    right = scored(1.0, acc=1.0)
    group = graded(right, failed, right)
    assert filter_scores(group.scored, metric="acc") is PromptEnd.FILTERED_ALL_RIGHT


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=16), st.booleans())
def test_kept_exactly_if_some_value_differs(values: list[float], uniform: bool) -> None:
    values = [values[0]] * len(values) if uniform else values
    kept = filter_scores([scored(value) for value in values], metric="score") is None
    assert kept == (len(set(values)) > 1)


def test_without_a_filter_values_that_are_all_alike_are_kept() -> None:
    assert filter_values(None, [True, True]) is None
    assert filter_values([1.0, 1.0], [True, True]) is PromptEnd.FILTERED_ALL_RIGHT


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=6))
def test_values_and_grades_say_what_their_samples_say(metrics: list[float]) -> None:
    samples = [scored(value, acc=value) for value in metrics]
    grades = [True if value >= 1.0 else (False if value <= 0.0 else None) for value in metrics]
    assert filter_values(metrics, grades) is filter_scores(samples, metric="acc")
