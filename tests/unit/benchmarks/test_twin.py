"""A simulation fitted to a run's record does what the run did."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from benchmarks.simulator.fit import FittedWorkload, calibrated, fit_run
from benchmarks.simulator.group_records import read_groups
from benchmarks.simulator.twin import TwinFigure, twin
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.errors import DataError
from sluice.simulate.recorder import SimulationRecorder
from sluice.simulate.result import simulate
from sluice.simulate.settings import FleetSettings, SimulationSettings, TrainerSettings
from sluice.simulate.workload import mixture_workload
from tests.unit.simulate.simulations import RecordedRun, recorded_group

Row = dict[str, float]

FLEET = FleetSettings(num_replicas=3, slots=48, base_step_s=0.004, per_sequence_s=0.0004)


def run_settings(max_staleness: int, train_s: float, handover_s: float = 0.0) -> SimulationSettings:
    return SimulationSettings(
        SamplingRules(StrategyName.STREAM, 16, max_staleness, 8),
        fleet=FLEET,
        trainer=TrainerSettings(train_s, 0.0, 4.0, 1.0, handover_s),
        num_steps=60,
        warmup_steps=0,
    )


@pytest.mark.parametrize(
    ("max_staleness", "train_s", "handover_s"),
    [(0, 60.0, 0.0), (2, 300.0, 20.0)],
)
def test_a_fitted_simulation_repeats_the_run_it_was_fitted_to(
    tmp_path: Path, max_staleness: int, train_s: float, handover_s: float
) -> None:
    settings, run = run_settings(max_staleness, train_s, handover_s), RecordedRun()
    simulate(settings, mixture_workload("mid", 3, 512), run.recorder)
    run.write(tmp_path, FLEET.num_replicas, 1.0, handover_s)

    fitted = fit_run(tmp_path, slots=FLEET.slots, slack=FLEET.slack)
    twin_settings = replace(settings, fleet=fitted.fleet, trainer=fitted.trainer, seed=1)
    twin_settings = calibrated(fitted, twin_settings)
    found = twin(fitted, twin_settings)

    assert fitted.fleet.num_replicas == FLEET.num_replicas
    assert fitted.trainer.train_s == pytest.approx(train_s)
    assert fitted.trainer.publish_s == pytest.approx(4.0)
    assert fitted.trainer.handover_s == pytest.approx(handover_s)
    step_s = twin_settings.fleet.step_s(24)
    assert step_s == pytest.approx(FLEET.step_s(24), rel=0.15)
    assert abs(found["step_time"].error) < 0.04
    assert abs(found["waste"].error) < 0.05
    assert abs(found["trainer_idle"].error) < 0.03
    assert abs(found["fleet_idle"].error) < 0.06


def test_a_slow_first_step_is_left_out_of_both_sides_and_the_others_are_in_both(
    tmp_path: Path,
) -> None:
    settings, run, num_steps = run_settings(1, 100.0), RecordedRun(), 10
    recorded_s = (5000.0, *(400.0 - 5.0 * step for step in range(59)))
    as_recorded = replace(settings, trainer=replace(settings.trainer, recorded_s=recorded_s))
    simulate(as_recorded, mixture_workload("mid", 3, 512), run.recorder)
    run.write(tmp_path, FLEET.num_replicas, 1.0)

    fitted = fit_run(tmp_path, slots=FLEET.slots, slack=FLEET.slack)
    twin_settings = replace(settings, fleet=fitted.fleet, trainer=fitted.trainer)
    found = twin(fitted, replace(twin_settings, num_steps=num_steps))

    mean_s = sum(recorded_s[1:num_steps]) / (num_steps - 1)
    assert mean_s < found["step_time"].real < mean_s + 40.0  # it waits for some batches
    assert abs(found["step_time"].error) < 0.02
    assert abs(found["trainer_idle"].error) < 0.02


def handover_of_a_changed_record(folder: Path, change: Callable[[list[Row]], None]) -> float:
    """Fitted to a run whose rows of metrics.jsonl were changed before."""
    run = RecordedRun()
    simulate(run_settings(2, 40.0, 20.0), mixture_workload("mid", 3, 512), run.recorder)
    run.write(folder, FLEET.num_replicas, 1.0, 20.0)
    file = folder / "metrics.jsonl"
    rows = [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines()]
    change(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return fit_run(folder, slots=FLEET.slots, slack=FLEET.slack).trainer.handover_s


def test_a_run_whose_record_tells_no_hand_over_apart_is_fitted_without(tmp_path: Path) -> None:
    def forget(rows: list[Row]) -> None:
        for row in rows:
            del row["timing_s/wait_groups"]

    assert handover_of_a_changed_record(tmp_path, forget) == 0.0


def test_the_hand_over_is_the_mean_wait_without_what_an_outage_took(tmp_path: Path) -> None:
    waits: list[float] = []

    def interrupt(rows: list[Row]) -> None:
        # Most take 1 s, each fourth 7 s; the third waits for a reward service that was away.
        waits.extend(7.0 if number % 4 == 3 else 1.0 for number in range(len(rows)))
        waits[2] = 90.0
        for row, wait_s in zip(rows, waits, strict=True):
            row["timing_s/wait_groups"] = row["timing_s/wait_batch"] - wait_s

    fitted_s = handover_of_a_changed_record(tmp_path, interrupt)
    expected = fmean([*waits[:2], *waits[3:]])
    assert fitted_s == pytest.approx(expected)
    assert 1.5 < expected < 3.5


def test_a_trainer_waits_for_the_hand_over_of_a_batch_that_is_formed_already() -> None:
    settings = run_settings(2, 300.0)  # publications overlap steps
    late = replace(settings, trainer=replace(settings.trainer, handover_s=30.0))
    quick_run, late_run = (
        simulate(each, mixture_workload("mid", 3, 512)) for each in (settings, late)
    )
    assert quick_run.trainer_idle_share < 0.01
    assert late_run.step_s == pytest.approx(330.0, rel=0.01)
    assert late_run.trainer_idle_share == pytest.approx(30.0 / 330.0, rel=0.02)


def test_an_error_of_an_idle_share_is_known_in_points_and_relative_to_the_share() -> None:
    idle = TwinFigure("fleet_idle", 0.10, 0.13)
    assert idle.error == idle.difference == pytest.approx(0.03)
    assert idle.relative_error == pytest.approx(0.3)
    seconds = TwinFigure("step_time", 4.0, 3.0)
    assert (seconds.error, seconds.difference, seconds.relative_error) == (-0.25, -1.0, -0.25)
    never = TwinFigure("trainer_idle", 0.0, 0.02)
    assert (never.error, never.relative_error) == (0.02, None)


def test_a_recorded_group_comes_back_whole() -> None:
    workload = FittedWorkload([recorded_group()])
    sampled = workload.samples(workload.prompt(0, 0), 0, 0, 4)
    assert sorted(sampled.tokens) == [10, 20, 30, 40]
    assert sum(sampled.are_right) == 2


def test_samples_beyond_the_recorded_ones_are_drawn_from_them() -> None:
    workload = FittedWorkload([recorded_group(right=0, scored=4)])
    sampled = workload.samples(workload.prompt(0, 0), 0, 0, 16)
    assert len(sampled.tokens) == 16
    assert not any(sampled.are_right)


def test_beyond_the_record_groups_come_from_the_versions_around() -> None:
    records = [recorded_group(key=str(version), oldest_version=version) for version in range(1000)]
    workload = FittedWorkload(records)
    for version in (0, 500, 999, 5000):
        keys = [int(workload.prompt(1000 + place, version).key) for place in range(50)]
        assert all(abs(key - min(version, 999)) <= 130 for key in keys)


def test_a_record_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"groups\.jsonl: missing"):
        fit_run(tmp_path, slots=4, slack=1.0)
    file = tmp_path / "groups.jsonl"
    file.write_text("not json\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1"):
        read_groups(file)
    file.write_text(json.dumps({"prompt_id": "p"}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1"):
        read_groups(file)
    file.write_text(line(tokens=[]), encoding="utf-8")
    with pytest.raises(DataError, match="no group was generated whole"):
        read_groups(file)
    file.write_text(line() + "{half", encoding="utf-8")
    assert len(read_groups(file)) == 1
    with pytest.raises(DataError, match="at least 2"):
        fit_run(tmp_path, slots=4, slack=1.0)


def line(**changes: object) -> str:
    return msgspec.json.encode(recorded_group(**changes)).decode() + "\n"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"probes": 2, "scored": 2, "tokens": [10, 20]}, "probes: 2"),
        ({"probes": 2}, "probes: 2"),  # it went on, others of the run did not
        ({"probability": 0.25}, "probability: 0.25"),
        ({"probes": 2, "generated_s": None}, "probes: 2"),
    ],
)
def test_a_record_of_a_strategy_that_leaves_something_out_is_refused(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    file = tmp_path / "groups.jsonl"
    file.write_text(line() + line(**changes), encoding="utf-8")
    with pytest.raises(DataError, match=f"line 2: .*{why}.*stream or rounds"):
        read_groups(file)
    file.write_text(line() + line(), encoding="utf-8")
    assert len(read_groups(file)) == 2


def test_recorded_training_times_come_again_in_their_order_and_the_others_are_drawn() -> None:
    settings = run_settings(0, 300.0)
    recorded = replace(settings.trainer, recorded_s=(100.0, 700.0, 200.0))
    recorder = SimulationRecorder()
    simulate(replace(settings, trainer=recorded), mixture_workload("mid", 3, 512), recorder)
    times = [step.trained_s - step.leased_s for step in recorder.steps]
    assert times == pytest.approx([100.0, 700.0, 200.0] + [300.0] * 57)
