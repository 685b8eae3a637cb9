"""What the benchmark reads from a finished run: its checkpoints and its clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_quickstart import seconds_to_target
from benchmarks.checkpoint_curve import checkpoints, training_seconds
from benchmarks.training_record import AccuracyPoint


def test_checkpoints_are_found_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("global_step_10", "global_step_2", "latest", "global_step_x"):
        (tmp_path / name).mkdir()
    assert checkpoints(tmp_path) == [
        (2, tmp_path / "global_step_2" / "actor" / "huggingface"),
        (10, tmp_path / "global_step_10" / "actor" / "huggingface"),
    ]


def test_the_clock_sums_whole_steps_and_nothing_else(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "training/global_step": 1, "timing_s/step": 2.0},
        {"step": 1, "timing_s/testing": 50.0},
        {"step": 2, "training/global_step": 2, "timing_s/step": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "accounts.json").write_text("{}")
    assert training_seconds(tmp_path) == [0.0, 2.0, 3.5]


@pytest.mark.parametrize(("target", "seconds"), [(0.5, 4.0), (0.6, 8.0), (0.9, None)])
def test_the_target_is_reached_at_the_first_point_at_or_above_it(
    target: float, seconds: float | None
) -> None:
    curve = [AccuracyPoint(0, 0.0, 0.2), AccuracyPoint(2, 4.0, 0.5), AccuracyPoint(4, 8.0, 0.7)]
    assert seconds_to_target(curve, target) == seconds
