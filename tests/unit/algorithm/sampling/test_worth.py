"""Whether samples are worth drawing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.choice import (
    AttemptEstimate,
    plain_price,
    rest_of_group,
    saved_by_probes,
    whole_attempt,
)
from sluice.algorithm.sampling.pass_rates import (
    GRID,
    GradeCounts,
    PassRateBelief,
    mixed_probability,
    posterior,
)

N = 16


def all_at(rate: float) -> np.ndarray:
    """Weights of the grid with all mass next to one pass rate."""
    weights = np.zeros(GRID.size)
    weights[int(np.abs(GRID - rate).argmin())] = 1.0
    return weights


def test_the_price_is_the_samples_generated_for_each_trained() -> None:
    population = PassRateBelief().population
    assert plain_price(population, N) == pytest.approx(1.0 / mixed_probability(population, N))


def test_the_price_is_one_where_every_group_is_mixed() -> None:
    assert plain_price(all_at(0.5), N) == pytest.approx(1.0, abs=1e-3)


def test_samples_had_at_exactly_the_price_are_worth_it() -> None:
    assert AttemptEstimate(cost=12.0, gain=6.0).value(2.0) == 1.0


def test_the_rest_of_a_group_costs_what_is_not_generated_yet_and_gains_the_whole_group() -> None:
    stakes = rest_of_group(all_at(0.5), num_right=4, num_probes=4, num_rest=12, samples_per_group=N)
    assert stakes.cost == 12.0
    assert stakes.gain == pytest.approx(N, rel=1e-3)


def test_uniform_probes_of_a_prompt_known_to_be_in_between_do_not_stop_it() -> None:
    price = plain_price(PassRateBelief().population, N)
    known = posterior(PassRateBelief().population, GradeCounts(8.0, 8.0))
    stakes = rest_of_group(known, num_right=4, num_probes=4, num_rest=12, samples_per_group=N)
    assert stakes.value(price) > 1.0


def test_right_probes_of_a_prompt_that_was_always_right_stop_it() -> None:
    known = posterior(PassRateBelief().population, GradeCounts(48.0, 0.0))
    stakes = rest_of_group(known, num_right=4, num_probes=4, num_rest=12, samples_per_group=N)
    assert stakes.value(1.8) < 1.0


def test_probes_make_an_attempt_at_a_hopeless_prompt_cheaper() -> None:
    hopeless = all_at(0.002)
    with_probes = whole_attempt(hopeless, probe_samples=4, samples_per_group=N, price=1.8)
    without = whole_attempt(hopeless, probe_samples=None, samples_per_group=N, price=1.8)
    assert without.cost == N
    assert with_probes.cost < 5.0


@given(st.floats(0.002, 0.998), st.integers(1, N - 1), st.floats(1.0, 4.0))
def test_an_attempt_never_costs_more_than_a_group_nor_gains_more_than_plain_sampling(
    rate: float, probes: int, price: float
) -> None:
    weights = all_at(rate)
    stakes = whole_attempt(weights, probe_samples=probes, samples_per_group=N, price=price)
    assert probes <= stakes.cost + 1e-9
    assert stakes.cost <= N + 1e-9
    assert -1e-9 <= stakes.gain <= N * mixed_probability(weights, N) + 1e-6


def test_probes_save_most_on_prompts_that_are_sure_to_be_uniform() -> None:
    def saved(rate: float) -> float:
        return saved_by_probes(all_at(rate), probe_samples=4, samples_per_group=N, price=1.8)

    assert saved(0.998) > 11.0
    assert saved(0.002) > 11.0
    assert saved(0.5) == 0.0
