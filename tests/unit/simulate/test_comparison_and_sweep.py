"""Comparisons are on equal terms, and a recommendation is the cheapest of the good ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.algorithm.sampling.rules import StrategyName
from sluice.simulate.result import simulate
from sluice.simulate.strategies import compare
from sluice.simulate.sweep import Sweep, SweepPoint, grid_around, recommend, sweep
from tests.unit.simulate.simulations import SmallWorkload, small


def test_all_strategies_are_compared_and_rounds_is_synchronous() -> None:
    steps: list[int] = []
    compared = compare(small(max_staleness=2), SmallWorkload, on_step=steps.append)
    by_name = {StrategyName(one.result.strategy): one for one in compared}
    assert list(by_name) == list(StrategyName)
    assert len(steps) == 2 * len(StrategyName) * 12
    assert by_name[StrategyName.ROUNDS].result.staleness_max == 0
    assert by_name[StrategyName.ROUNDS].gen_ratio == 1.0
    assert by_name[StrategyName.ROUNDS].fill_speedup == 1.0
    assert by_name[StrategyName.STREAM].hard_share_ratio == 1.0
    assert by_name[StrategyName.STREAM].fill_speedup > 1.0
    assert by_name[StrategyName.STREAM].result.num_kept_discarded == 0


@pytest.mark.parametrize(("chosen", "at_edge"), [(0, False), (1, True), (2, True)])
def test_a_recommendation_at_the_edge_of_the_grid_is_known_as_one(
    chosen: int, at_edge: bool
) -> None:
    points = sweep(small(num_steps=4), SmallWorkload, (1, 2), (0, 1)).points
    assert Sweep(points, points[chosen]).is_at_edge is at_edge


def test_a_sweep_simulates_the_whole_grid() -> None:
    found = sweep(small(), SmallWorkload, (1, 4), (0, 1))
    places = [(point.num_replicas, point.max_staleness) for point in found.points]
    assert places == [(1, 0), (1, 1), (4, 0), (4, 1)]
    assert found.recommended in found.points


@pytest.mark.parametrize(
    ("rates", "recommended"),
    [
        ({(1, 0): 50.0, (2, 0): 99.0, (2, 1): 100.0}, (2, 0)),
        ({(1, 4): 98.5, (2, 0): 100.0}, (1, 4)),
        ({(1, 0): 97.0, (2, 1): 98.1, (2, 2): 100.0, (4, 0): 100.0}, (2, 1)),
    ],
)
def test_the_fewest_replicas_then_the_least_staleness_within_2_percent_are_recommended(
    rates: dict[tuple[int, int], float], recommended: tuple[int, int]
) -> None:
    result = simulate(small(num_steps=4), SmallWorkload())
    points = [
        SweepPoint(*place, replace(result, steps_per_hour=rate)) for place, rate in rates.items()
    ]
    best = recommend(points)
    assert (best.num_replicas, best.max_staleness) == recommended


def test_the_grid_holds_what_was_asked_for() -> None:
    sizes, bounds = grid_around(1, 3)
    assert sizes[0] == 1
    assert {0, 3} <= set(bounds)
    assert 6 in grid_around(6, 0)[0]
