"""The belief about pass rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.pass_rates import (
    GRID,
    GradeCounts,
    PassRateBelief,
    all_right_probability,
    all_wrong_probability,
    hard_probability,
    mean_pass_rate,
    mixed_probability,
    posterior,
)

counts = st.floats(0.0, 64.0)


@given(counts, counts)
def test_a_posterior_is_a_distribution(right: float, wrong: float) -> None:
    weights = posterior(PassRateBelief().population, GradeCounts(right, wrong))
    assert weights.min() >= 0.0
    assert weights.sum() == pytest.approx(1.0)


@given(counts, counts, st.floats(0.5, 16.0))
def test_a_further_right_sample_raises_the_expected_pass_rate(
    right: float, wrong: float, more: float
) -> None:
    belief = PassRateBelief()
    before = mean_pass_rate(posterior(belief.population, GradeCounts(right, wrong)))
    assert mean_pass_rate(posterior(belief.population, GradeCounts(right + more, wrong))) > before


@given(counts, counts, st.integers(1, 32))
def test_all_right_all_wrong_and_mixed_are_all_there_is(
    right: float, wrong: float, num_samples: int
) -> None:
    weights = posterior(PassRateBelief().population, GradeCounts(right, wrong))
    total = (
        all_right_probability(weights, num_samples)
        + all_wrong_probability(weights, num_samples)
        + mixed_probability(weights, num_samples)
    )
    assert total == pytest.approx(1.0)


def test_evidence_in_two_portions_counts_like_both_at_once() -> None:
    population = PassRateBelief().population
    at_once = posterior(population, GradeCounts(3.0, 5.0))
    in_turn = posterior(posterior(population, GradeCounts(1.0, 4.0)), GradeCounts(2.0, 1.0))
    np.testing.assert_allclose(at_once, in_turn)


def test_no_samples_are_never_mixed() -> None:
    assert mixed_probability(PassRateBelief().population, 0) == 0.0


def test_the_population_is_learnt_from_groups_of_few_samples() -> None:
    generator = np.random.default_rng(0)
    belief = PassRateBelief()
    for _ in range(60):
        rates = generator.choice([0.02, 0.98], p=[0.75, 0.25], size=64)
        right = generator.binomial(4, rates)
        belief = belief.learn([(GradeCounts(float(r), float(4 - r)), 1.0) for r in right])
    population = belief.population
    assert float(population[GRID > 0.5].sum()) == pytest.approx(0.25, abs=0.05)
    assert mixed_probability(population, 16) == pytest.approx(1.0 - 0.98**16, abs=0.08)


def test_stopping_groups_by_their_samples_does_not_bend_what_is_learnt() -> None:
    generator = np.random.default_rng(1)
    belief = PassRateBelief()
    for _ in range(60):
        seen = []
        for rate in generator.choice([0.05, 0.6, 0.97], p=[0.4, 0.3, 0.3], size=64):
            probes = int(generator.binomial(4, rate))
            more = int(generator.binomial(12, rate)) if 0 < probes < 4 else 0
            sampled = 16 if 0 < probes < 4 else 4
            seen.append((GradeCounts(float(probes + more), float(sampled - probes - more)), 1.0))
        belief = belief.learn(seen)
    assert mean_pass_rate(belief.population) == pytest.approx(0.491, abs=0.05)


def test_a_prompt_sampled_rarely_stands_for_many() -> None:
    once, often = GradeCounts(16.0, 0.0), GradeCounts(0.0, 16.0)
    even = PassRateBelief().learn([(once, 4.0), (often, 4.0)])
    tilted = PassRateBelief().learn([(once, 40.0), (often, 4.0)])
    assert mean_pass_rate(tilted.population) > mean_pass_rate(even.population)


def test_nothing_seen_changes_nothing() -> None:
    belief = PassRateBelief()
    assert belief.learn([]) is belief


def test_sixteen_wrong_samples_make_a_prompt_probably_hard_and_right_ones_do_not() -> None:
    belief = PassRateBelief()
    assert hard_probability(posterior(belief.population, GradeCounts(0.0, 16.0))) > 0.85
    assert hard_probability(posterior(belief.population, GradeCounts(16.0, 0.0))) < 1e-6


def test_of_the_point_at_the_limit_of_hard_a_part_is_hard() -> None:
    by_rate = [
        hard_probability((np.arange(GRID.size) == i).astype(float)) for i in range(GRID.size)
    ]
    assert sorted(by_rate, reverse=True) == by_rate
    assert all(hard == 1.0 for hard, rate in zip(by_rate, GRID, strict=True) if rate < 0.08)
    assert all(hard == 0.0 for hard, rate in zip(by_rate, GRID, strict=True) if rate > 0.12)
    # The cells before it end at 0.089, its own at 0.118; the limit is 0.1.
    (at_limit,) = [hard for hard, rate in zip(by_rate, GRID, strict=True) if 0.08 < rate < 0.12]
    assert at_limit == pytest.approx(0.41, abs=0.01)
