"""`make bench-sampling` prints ratios of real runs and says whose idle share the twin misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_sampling import _overlapped
from benchmarks.sampling_real import RealRun, twin_errors, twin_idle_errors
from benchmarks.sampling_real_tables import print_strategies, print_synchrony, print_twin_errors
from benchmarks.simulator_speed import measure_simulator
from sluice.report.run_record import RunRecord
from sluice.simulate.fitting.twin import Twin, TwinFigure
from sluice.simulate.result import simulate
from sluice.simulate.strategies import simulate_fill_times
from tests.unit.simulate.simulations import SmallWorkload, small


def run(name: str, step_s: float, gen_per_trained: float = 1.0, accuracy: float = 0.5) -> RealRun:
    row = {"step": 8, "val-core/task/acc/mean@4": accuracy}
    record = RunRecord((row,), (row,), {})
    return RealRun(name, Path(name), record, step_s, gen_per_trained, 0.0, 0.0, None)


@pytest.fixture
def twin_of_a_run() -> Twin:
    settings = small(num_steps=4)
    figures = (
        TwinFigure("step_time", 4.0, 3.0),
        TwinFigure("trainer_idle", 0.0, 0.02),
        TwinFigure("fleet_idle", 0.40, 0.30),
        TwinFigure("waste", 1.5, 1.53),
    )
    fill = simulate_fill_times(settings, SmallWorkload())
    return Twin(figures, simulate(settings, SmallWorkload()), fill)


def lines(text: str) -> dict[str, list[str]]:
    """Cells of each row by its first word, or by the first two where that is `async,`."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return {cells[0]: cells[1:] for cells in rows}


def test_real_strategies_are_printed_with_their_ratios_to_rounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_strategies([run("rounds", 4.0, 2.0), run("stream", 2.5, 1.5)])
    rows = lines(capsys.readouterr().out)
    assert rows["rounds"] == ["2.00", "1.00x", "4.00", "1.00x"]
    assert rows["stream"] == ["1.50", "0.75x", "2.50", "1.60x"]


def test_synchronous_and_asynchronous_runs_are_printed_with_their_ratio(
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_seed = [
        {0.0: run("sync", 3.0, accuracy=0.9), 1.0: run("async", each, accuracy=0.8)}
        for each in (1.5, 2.0, 3.0)
    ]
    figures = _overlapped([(runs[0.0], runs[1.0]) for runs in by_seed], 8)
    print_synchrony(by_seed, {1.0: figures})
    rows = lines(capsys.readouterr().out)
    assert rows["sync"] == ["3.00", "1.00x", "0.900", "1.00x"]
    assert rows["async,"] == ["1", "drawn", "ahead", "2.00", "1.50x", "0.800", "1.33x"]


def test_the_twins_idle_errors_are_the_trainers_and_the_fleets_in_points_and_relative(
    twin_of_a_run: Twin,
) -> None:
    assert twin_idle_errors(twin_of_a_run) == {
        "trainer": {"run": 0.0, "simulated": 0.02, "points": 2.0, "relative": None},
        "fleet": {"run": 0.4, "simulated": 0.3, "points": 10.0, "relative": 0.25},
    }
    assert twin_errors(twin_of_a_run) == {"step_time": 0.25, "idle": 0.1, "waste": 0.02}


def test_the_twins_errors_are_printed_in_points_and_relative(
    twin_of_a_run: Twin, capsys: pytest.CaptureFixture[str]
) -> None:
    print_twin_errors(twin_of_a_run)
    rows = capsys.readouterr().out.splitlines()
    cells = {" ".join(row.split()[:2]): row.split()[2:] for row in rows}
    assert cells["step time"] == ["4.000", "3.000", "-1.000", "-25.0%"]
    assert cells["trainer idle"] == ["0.0%", "2.0%", "+2.0", "points"]
    assert cells["fleet idle"] == ["40.0%", "30.0%", "-10.0", "points", "-25.0%"]


def test_the_simulator_is_timed_on_1024_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    found = measure_simulator(steps=2, least_samples=1)
    assert found.seconds > 0.0
    assert found.num_samples >= 2 * 512 * 16
    assert f"{found.num_samples:,} samples on 1,024 replicas" in capsys.readouterr().out


def test_too_few_samples_are_no_measurement_of_the_simulator() -> None:
    with pytest.raises(SystemExit, match="1,000,000 are to be timed; raise _STEPS"):
        measure_simulator(steps=2)
