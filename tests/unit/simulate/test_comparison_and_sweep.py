"""Comparisons are on equal terms, and a recommendation is the cheapest of the good ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.algorithm.sampling.rules import StrategyName
from sluice.simulate.fitting.plots import plot_comparison, plot_result, plot_sweep
from sluice.simulate.fitting.sweep import Sweep, SweepPoint, grid_around, recommend, sweep
from sluice.simulate.result import simulate
from sluice.simulate.settings import TrainerSettings
from sluice.simulate.strategies import compare, simulate_fill_times
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


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    compared = compare(small(num_steps=5), SmallWorkload)
    files = plot_comparison(tmp_path / "compare", compared)
    files += plot_result(tmp_path / "one", compared[1].result, compared[1].fill)
    files += plot_sweep(tmp_path, sweep(small(num_steps=4), SmallWorkload, (1, 2), (0, 1)))
    assert {file.name for file in files} == {
        *("generated-per-trained.png", "fill-time.png", "fill-time-curves.png", "staleness.png"),
        *("step-time-curves.png", "sweep.png"),
    }
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_a_curve_of_fill_times_shows_the_trainer_that_takes_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    sampled = {}

    def remember(self: object, file: Path, **_: object) -> None:
        axes = self.axes[0]  # type: ignore[attr-defined]
        times = [round(float(time), 6) for time in axes.lines[0].get_xdata()] if axes.lines else []
        sampled[file.name] = axes.get_xlabel(), times

    monkeypatch.setattr(figure.Figure, "savefig", remember)
    settings = small(num_steps=6, trainer=TrainerSettings(train_s=100.0))
    result = simulate(settings, SmallWorkload())
    fill = simulate_fill_times(settings, SmallWorkload())
    plot_result(tmp_path, result, fill)
    label, times = sampled["fill-time-curves.png"]
    assert label == "seconds to fill a batch (a trainer that takes no time)"
    assert times == sorted(round(time, 6) for time in fill.ideal.step_times_s)
    label, times = sampled["step-time-curves.png"]
    assert label == "seconds of a step, the trainer's part included"
    assert times == sorted(round(time, 6) for time in result.step_times_s)
