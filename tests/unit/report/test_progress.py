"""The lines of a log: what a run is doing while it starts, waits and trains."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sluice.client.run_monitor import ReplicaSnapshot, RunSnapshot
from sluice.report.progress import (
    LINE_WIDTH,
    TimeLeft,
    duration_text,
    starting_line,
    state_line,
    step_line,
)

METRICS = {
    "critic/rewards/mean": -0.5,
    "actor/entropy": 0.31,
    "response_length/mean": 212.4,
    "train/groups_kept": 16.0,
    "train/groups_all_right": 40.0,
    "train/groups_all_wrong": 5.0,
    "train/staleness_max": 1.0,
    "rollout/tokens_per_s": 1234.5,
    "timing_s/step": 4.2,
}
LARGE = {name: value * 1000 for name, value in METRICS.items()}


def test_a_step_is_one_line_in_the_words_of_the_field() -> None:
    assert step_line(12, 262, METRICS, "ETA 17 min") == (
        "step  12/262  reward -0.500  entropy 0.310  length 212  kept 16/61  staleness 1  "
        "1,234 tok/s  4.2 s/step  ETA 17 min"
    )


@pytest.mark.parametrize("metrics", [{}, METRICS, LARGE])
def test_a_step_line_is_never_wider_than_120_columns(metrics: Mapping[str, float]) -> None:
    line = step_line(12_000, 262_000, metrics, "ETA 30 h 05 min")
    assert len(line) <= LINE_WIDTH
    assert line.startswith("step  12000/262000")
    assert line.endswith("ETA 30 h 05 min")


def test_the_time_left_is_the_mean_of_the_last_steps_times_the_rest() -> None:
    left = TimeLeft()
    assert left.update(1, 101, {}) == ""
    assert left.update(2, 62, {"timing_s/step": 1.0}) == "ETA 60 s"
    assert left.update(3, 63, {"timing_s/step": 3.0}) == "ETA 2 min"
    assert left.update(63, 63, {"timing_s/step": 3.0}) == "", "nothing is left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (90, "90 s"), (1020, "17 min"), (7500, "2 h 05 min"), (302_400, "3.5 days")],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_starting_run_names_what_is_not_up_and_its_last_message() -> None:
    starting = {"trainer": "loading the model from /m", "r-0": ""}
    assert starting_line(1, starting, 12.3) == (
        "starting (12 s): 1 of 3 up; trainer: loading the model from /m; r-0"
    )


def test_a_starting_line_of_a_large_fleet_is_cut_with_a_count() -> None:
    line = starting_line(2, {f"rollout-{i}": "x" * 200 for i in range(64)}, 1.0)
    assert len(line) <= LINE_WIDTH
    assert line.startswith("starting (1 s): 2 of 66 up; rollout-0: xxx")
    assert line.endswith("; and 63 more")


def snapshot(phase: str, *, validation: tuple[int, int] = (0, 0)) -> RunSnapshot:
    replica = ReplicaSnapshot("rollout-0", "127.0.0.1:7", "serving", 3, 256, 120, 600.0, 0.3)
    return RunSnapshot(
        phase,
        12.0,
        3,
        60,
        3,
        (replica, replica),
        {},
        {},
        (),
        groups={"kept": 23, "generating": 40, "grading": 1},
        validation=validation,
    )


@pytest.mark.parametrize(
    ("phase", "validation", "text"),
    [
        ("waiting for replicas", (0, 0), "2 of 4 replicas registered"),
        (
            "waiting for batch",
            (0, 0),
            "step 4/60: batch 23 of 64 groups, 40 generating, 1,200 tok/s",
        ),
        (
            "waiting for batch",
            (17, 40),
            "step 4/60: batch 23 of 64 groups, 40 generating, 1,200 tok/s; "
            "validating 17 of 40 prompts",
        ),
        ("training", (0, 0), "step 4/60: training"),
        ("publishing", (0, 0), "publishing weights to 2 replicas"),
        ("evaluating", (17, 40), "validating 17 of 40 prompts"),
        ("evaluating", (0, 0), "validating"),
        ("saving", (0, 0), "saving the checkpoint of step 3"),
        ("finished", (0, 0), "ending"),
    ],
)
def test_every_phase_has_a_line_with_its_numbers(
    phase: str, validation: tuple[int, int], text: str
) -> None:
    line = state_line(snapshot(phase, validation=validation), batch_size=64, min_replicas=4)
    assert line == f"{text} (12 s)"
    assert len(line) <= LINE_WIDTH
