"""The verdict of the page's first line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.client.launcher import LaunchedProcess
from sluice.client.run_monitor import ReplicaSnapshot, RunSnapshot, WatchedRule
from sluice.dashboard.overview import RunHealthInputs, RunVerdict, health_of, overview
from sluice.dashboard.step_history import StepHistory

REPLICA = ReplicaSnapshot("rollout-0", "127.0.0.1:1", "serving", 3, 8, 4, 100.0, 0.1)
RUN = RunSnapshot(
    phase="training",
    phase_seconds=2.0,
    step=3,
    total_steps=9,
    version=3,
    replicas=(REPLICA, replace(REPLICA, name="rollout-1", state="pending")),
    metrics={},
)
WELL = RunHealthInputs(
    run=RUN,
    is_finished=False,
    step_s=3.0,
    wait="",
    prompts={},
    recent={"kept": 64.0, "all_right": 30.0, "failed": 1.0},
    residual_share=0.0,
    processes=(),
)


def test_a_run_that_gets_on_is_healthy() -> None:
    assert health_of(WELL) == health_of(replace(WELL, run=replace(RUN, phase="waiting for batch")))
    assert health_of(WELL).verdict is RunVerdict.HEALTHY
    assert health_of(WELL).reasons == ()


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        (replace(WELL, run=None), RunVerdict.NOT_RUNNING, "does not answer"),
        (
            replace(WELL, run=None, wait="its process 7 is stopped by a signal"),
            RunVerdict.TROUBLE,
            "the trainer does not answer; its process 7 is stopped",
        ),
        (
            replace(
                WELL, run=replace(RUN, phase_seconds=61.0), wait="the reward service is stopped"
            ),
            RunVerdict.ATTENTION,
            "training for 61 s; the reward service is stopped",
        ),
        (
            replace(
                WELL,
                processes=(LaunchedProcess("rollout-1", 0, 2, is_draining=False, max_restarts=5),),
            ),
            RunVerdict.ATTENTION,
            "rollout-1 is being restarted (try 2 of 5)",
        ),
        (
            replace(
                WELL,
                run=None,
                processes=(LaunchedProcess("trainer", 0, 1, is_draining=False, max_restarts=5),),
            ),
            RunVerdict.TROUBLE,
            "trainer is being restarted (try 1 of 5)",
        ),
        (
            replace(WELL, run=replace(RUN, phase="paused", phase_seconds=5.0)),
            RunVerdict.ATTENTION,
            "held between",
        ),
        (
            replace(WELL, run=replace(RUN, phase="paused", hold_reason="accuracy fell")),
            RunVerdict.ATTENTION,
            "held by a guard: accuracy fell; `sluice resume` ends the hold",
        ),
        (
            replace(
                WELL,
                run=replace(RUN, guards=(WatchedRule("hold when x", "no signal", "no row has x"),)),
            ),
            RunVerdict.ATTENTION,
            "no signal for the guard 'hold when x': no row has x",
        ),
        (
            replace(
                WELL,
                run=replace(RUN, replicas=(REPLICA, replace(REPLICA, name="b", state="stalled"))),
            ),
            RunVerdict.ATTENTION,
            "replica b is stalled",
        ),
        (
            replace(WELL, run=replace(RUN, replicas=(replace(REPLICA, state="stalled"),))),
            RunVerdict.TROUBLE,
            "no replica serves",
        ),
        (
            replace(
                WELL, run=replace(RUN, phase="waiting for batch", replicas=())
            ),  # the trainer has dropped it
            RunVerdict.TROUBLE,
            "no replica serves",
        ),
        (replace(WELL, prompts={"prompts_lost": 2.0}), RunVerdict.TROUBLE, "2 prompts are lost"),
        (replace(WELL, recent={"kept": 1.0, "failed": 1.0}), RunVerdict.ATTENTION, "50% of the"),
        (replace(WELL, recent={"kept": 1.0, "all_right": 99.0}), RunVerdict.ATTENTION, "only 1.0%"),
        (replace(WELL, residual_share=-0.05), RunVerdict.ATTENTION, "5.0% of all tokens"),
    ],
)
def test_what_is_wrong_is_said(facts: RunHealthInputs, verdict: RunVerdict, words: str) -> None:
    found = health_of(facts)
    assert found.verdict is verdict
    assert words in "; ".join(found.reasons)


@pytest.mark.parametrize("phase", ["starting", "waiting for replicas"])
def test_a_run_that_waits_for_its_first_replica_is_in_no_trouble(phase: str) -> None:
    assert (
        health_of(replace(WELL, run=replace(RUN, phase=phase, replicas=()))).verdict
        is RunVerdict.HEALTHY
    )


@pytest.mark.parametrize("phase", ["paused", "saving"])
def test_a_phase_that_needs_no_replica_is_no_trouble_without_one(phase: str) -> None:
    found = health_of(replace(WELL, run=replace(RUN, phase=phase, replicas=())))
    assert found.verdict is not RunVerdict.TROUBLE


def test_a_finished_run_that_has_lost_prompts_says_so(tmp_path: Path) -> None:
    shown = overview("run", 5, {"prompts_lost": 3.0}, StepHistory(tmp_path), None)
    assert (shown["health"], shown["reasons"]) == (
        "finished",
        ["3 prompts are lost: neither pending nor ended"],
    )


def test_slow_steps_are_no_stall() -> None:
    assert (
        health_of(replace(WELL, run=replace(RUN, phase_seconds=400.0), step_s=100.0)).verdict
        is RunVerdict.HEALTHY
    )


def test_a_run_that_reached_its_end_is_finished_whether_it_still_answers_or_not() -> None:
    for facts in (
        replace(WELL, run=None, is_finished=True),
        replace(WELL, run=replace(RUN, phase="finished")),
    ):
        assert health_of(facts).verdict is RunVerdict.FINISHED
