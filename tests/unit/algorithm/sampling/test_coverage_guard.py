"""The coverage guard: shares of hard prompts, and the probabilities that keep them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.coverage_guard import (
    AIM,
    GAIN,
    MAX_HARD_FACTOR,
    MIN_PLAIN,
    CoverageGuard,
    Side,
)


def kept_like(
    guard: CoverageGuard, generator: np.random.Generator, num_attempts: int
) -> tuple[CoverageGuard, int, int]:
    """Groups sampled as the guard says: 50 % sure (4 % of them hard), 30 % easy, 20 % hard."""
    kept = hard = 0
    for _ in range(num_attempts):
        side = (Side.NONE, Side.EASY, Side.HARD)[int(generator.choice(3, p=[0.5, 0.3, 0.2]))]
        hardness = {Side.NONE: generator.random() < 0.04, Side.EASY: False, Side.HARD: True}[side]
        probability = guard.probability(side, 0.8)
        if generator.random() < probability:
            guard = guard.add_kept(
                side, hardness=float(hardness), value=0.8, probability=probability
            )
            kept, hard = kept + 1, hard + int(hardness)
    return guard, kept, hard


def test_what_met_no_choice_is_always_sampled() -> None:
    assert CoverageGuard(0.1).probability(Side.NONE) == 1.0


def test_hard_prompts_are_all_sampled_until_shares_are_known() -> None:
    assert CoverageGuard(0.1).probability(Side.HARD, 0.3) == 1.0


def test_the_easy_side_is_sampled_as_rarely_as_allowed() -> None:
    assert CoverageGuard(0.1).probability(Side.EASY, 0.9) == 0.1


def test_without_the_guard_both_sides_are_explored_alike() -> None:
    guard = CoverageGuard(0.2, is_on=False)
    assert guard.probability(Side.EASY) == guard.probability(Side.HARD) == 0.2


def test_the_share_of_hard_prompts_stays_what_plain_drawing_gives() -> None:
    generator = np.random.default_rng(0)
    guard, _, _ = kept_like(CoverageGuard(0.1), generator, 3000)
    _, kept, hard = kept_like(guard, generator, 8000)
    assert hard / kept == pytest.approx(0.22, rel=0.1)


def test_without_the_guard_the_share_would_fall() -> None:
    generator = np.random.default_rng(0)
    _, kept, hard = kept_like(CoverageGuard(0.1, is_on=False), generator, 8000)
    assert hard / kept < 0.22 * 0.6


def test_the_share_of_plain_sampling_is_estimated_though_groups_are_sampled_unevenly() -> None:
    generator = np.random.default_rng(2)
    guard, _, _ = kept_like(CoverageGuard(0.25), generator, 8000)
    assert guard.plain_share == pytest.approx(0.22, rel=0.15)


def test_too_many_hard_prompts_raise_the_easy_side_instead() -> None:
    guard = CoverageGuard(0.1)
    for _ in range(200):
        guard = guard.add_kept(Side.NONE, hardness=0.3, value=1.0, probability=1.0)
        guard = guard.add_kept(Side.EASY, hardness=0.0, value=0.9, probability=0.2)
    assert guard.probability(Side.EASY, 0.9) > 0.1


def with_plain_prompts() -> CoverageGuard:
    """200 times a hard group that is sure, one of the hard side, and a plain one."""
    guard = CoverageGuard(0.1)
    for _ in range(200):
        guard = guard.add_kept(Side.NONE, hardness=1.0, value=1.0, probability=1.0)
        guard = guard.add_kept(Side.HARD, hardness=1.0, value=0.5, probability=0.5)
        guard = guard.add_kept(Side.PLAIN, hardness=0.0, value=1.0, probability=0.6)
    return guard


def test_plain_prompts_are_sampled_less_often_rather_than_most_hopeless_ones() -> None:
    guard = with_plain_prompts()
    assert MIN_PLAIN <= guard.probability(Side.PLAIN) < 1.0
    assert guard.probability(Side.HARD, 1.0) == pytest.approx(MAX_HARD_FACTOR)


def test_the_plain_side_and_the_hard_side_solve_the_aimed_share() -> None:
    guard = with_plain_prompts()
    s, w = guard.probability(Side.PLAIN), guard.probability(Side.HARD, 1.0)
    unchosen, plain, hard = (guard.classes[x] for x in (Side.NONE, Side.PLAIN, Side.HARD))
    num_hard = unchosen.expected_hard + w * hard.value_hard
    aim = guard.plain_share * (AIM + GAIN * (AIM - guard.ratio))
    assert num_hard / (unchosen.expected + s * plain.expected + w * hard.value) == pytest.approx(
        aim
    )


def test_plain_prompts_are_all_sampled_where_few_of_the_hard_side_keep_the_share() -> None:
    guard = CoverageGuard(0.1)
    for i in range(400):
        guard = guard.add_kept(Side.NONE, hardness=0.5, value=1.0, probability=1.0)
        guard = guard.add_kept(Side.PLAIN, hardness=0.45, value=1.0, probability=1.0)
        if i % 12 == 0:
            guard = guard.add_kept(Side.HARD, hardness=1.0, value=0.5, probability=0.2)
        if i % 50 in {0, 17, 34}:
            guard = guard.add_kept(Side.EASY, hardness=0.0, value=0.5, probability=0.1)
    assert guard.probability(Side.PLAIN) == 1.0
    assert 0.1 < guard.probability(Side.HARD, 1.0) < MAX_HARD_FACTOR


def test_without_the_guard_plain_prompts_are_all_sampled() -> None:
    assert CoverageGuard(0.1, is_on=False).probability(Side.PLAIN) == 1.0


def test_plain_prompts_are_all_sampled_until_shares_are_known() -> None:
    assert CoverageGuard(0.1).probability(Side.PLAIN) == 1.0


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Side)), st.floats(0, 1), st.floats(0, 1), st.floats(0.05, 1))
    ),
    st.floats(0, 1),
)
def test_probabilities_lie_between_exploration_and_one(
    groups: list[tuple[Side, float, float, float]], value: float
) -> None:
    guard = CoverageGuard(0.05)
    for side, hardness, its_worth, probability in groups:
        guard = guard.add_kept(side, hardness=hardness, value=its_worth, probability=probability)
    for side in Side:
        assert 0.05 <= guard.probability(side, value) <= 1.0
