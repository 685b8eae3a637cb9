"""The columns kept from `metrics.jsonl`, and the curves made of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from sluice.dashboard import step_history
from sluice.dashboard.curves import curve_points, metric_points
from sluice.dashboard.line_tail import LineTail
from sluice.dashboard.step_history import StepHistory
from tests.support.dashboard_run import add_lines, step_row

REWARD = "critic/rewards/mean"


def read(source: StepHistory) -> None:
    while source.read():
        pass


def test_a_step_that_was_trained_again_voids_all_that_was_known_from_it_on(tmp_path: Path) -> None:
    history = StepHistory(tmp_path)
    file, accuracy = tmp_path / "metrics.jsonl", "val-core/a/acc/mean@2"
    add_lines(file, [step_row(n, **{REWARD: float(n)}) for n in (1, 2, 3)])
    add_lines(file, [{"step": n, accuracy: 0.5} for n in (0, 1, 2, 3)])
    read(history)
    add_lines(file, [step_row(2, **{REWARD: -1.0})])
    read(history)
    assert history.steps.tolist() == [1, 2]
    assert history.column(REWARD).tolist() == [1.0, -1.0]
    assert history.validated_steps() == history.series(accuracy)[0].tolist() == [0, 1]


def test_a_validation_that_comes_late_takes_its_place(tmp_path: Path) -> None:
    history, name = StepHistory(tmp_path), "val/failed"
    add_lines(tmp_path / "metrics.jsonl", [{"step": n, name: float(n)} for n in (1, 3, 2)])
    read(history)
    assert [part.tolist() for part in history.series(name)] == [[1, 2, 3], [1.0, 2.0, 3.0]]


def test_what_is_missing_or_no_number_is_a_gap(tmp_path: Path) -> None:
    history = StepHistory(tmp_path)
    add_lines(tmp_path / "metrics.jsonl", [step_row(1), step_row(2, **{REWARD: None})])
    read(history)
    assert np.isnan(history.column(REWARD)).all()
    curve = curve_points(history, 100)["curves"]["reward"]
    assert curve == {"x": [1, 2], "y": [None, None]}


def test_lines_that_are_no_metrics_are_counted_and_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}x\n[1]\n\n{"no": 1}\n{"step": 1e999}\n', encoding="utf-8")
    add_lines(file, [step_row(5)])
    history = StepHistory(tmp_path)
    read(history)
    assert history.steps.tolist() == [5]
    assert history.num_unread == 4


def test_a_line_beyond_the_bound_counts_as_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(path: Path) -> LineTail:
        return LineTail(path, chunk_bytes=64, max_line_bytes=256)

    monkeypatch.setattr(step_history, "LineTail", short)
    (tmp_path / "metrics.jsonl").write_text("x" * 1000 + "\n", encoding="utf-8")
    history = StepHistory(tmp_path)
    read(history)
    assert history.num_unread == 1


def test_validations_are_distinguished_from_steps(tmp_path: Path) -> None:
    rows = [{"step": 0, "val-core/a/acc/mean@2": 0.25, "val-core/b/acc/mean@2": 0.75}, step_row(1)]
    add_lines(tmp_path / "metrics.jsonl", rows)
    history = StepHistory(tmp_path)
    read(history)
    assert history.accuracies() == [(0, 0.5)]
    assert history.steps.tolist() == [1]


def test_every_metric_of_steps_and_of_validations_can_be_plotted(tmp_path: Path) -> None:
    rows = [{"step": 0, "val/failed": 3.0}, step_row(1), step_row(2, new=5.0), step_row(3)]
    add_lines(tmp_path / "metrics.jsonl", [*rows, {"step": 3, "val/failed": 1.0}])
    history = StepHistory(tmp_path)
    read(history)
    assert history.names == ["new", "training/global_step", "val/failed"]
    assert metric_points(history, "new", 100) == {"x": [2], "y": [5.0]}
    assert metric_points(history, "val/failed", 100) == {"x": [0, 3], "y": [3.0, 1.0]}
    assert metric_points(history, "nothing", 100) == {"x": [], "y": []}


def test_the_phases_of_a_step_add_up_to_its_seconds(tmp_path: Path) -> None:
    seconds = {
        "timing_s/step": 10.0,
        "timing_s/wait_batch": 4.0,
        "timing_s/old_log_prob": 1.0,
        "timing_s/update_actor": 2.0,
        "timing_s/adv": 0.5,
        "timing_s/update_weights": 1.0,
    }
    add_lines(tmp_path / "metrics.jsonl", [step_row(1, **seconds), step_row(2)])
    history = StepHistory(tmp_path)
    read(history)
    timing = curve_points(history, 100)["timing"]
    assert (timing["batch"], timing["logprobs"], timing["update"]) == ([4.0, 0], [1.0, 0], [2.5, 0])
    assert (timing["weights"], timing["checkpoint"], timing["other"]) == (
        [1.0, 0],
        [0, 0],
        [1.5, 0],
    )


def test_a_file_with_ever_new_names_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_history, "_MAX_METRICS", 5)
    add_lines(tmp_path / "metrics.jsonl", [step_row(n, **{f"name{n}": 1.0}) for n in range(1, 100)])
    history = StepHistory(tmp_path)
    read(history)
    assert len(history.names) <= 5
    assert history.steps.size == 99


def test_a_hundred_thousand_steps_become_few_points_with_their_peak(tmp_path: Path) -> None:
    history = StepHistory(tmp_path)
    add_lines(
        tmp_path / "metrics.jsonl",
        [
            step_row(n, **{REWARD: 99.0 if n == 54_321 else math.sin(n), "train/groups_kept": 2.0})
            for n in range(1, 100_001)
        ],
    )
    read(history)
    sampled = curve_points(history, 400)
    assert sampled["num_steps"] == 100_000
    reward, composition = sampled["curves"]["reward"], sampled["composition"]
    assert len(reward["x"]) <= 400
    assert reward["x"][reward["y"].index(99.0)] == 54_321
    assert len(composition["kept"]) <= 400
    assert sum(composition["kept"]) == 200_000
    assert (composition["from"][0], composition["to"][-1]) == (1, 100_000)
