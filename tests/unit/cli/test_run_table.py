"""What is shown of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console

from sluice.cli.watch.live_view import run_table, step_line
from sluice.client.run_monitor import AwaitedPeer, ReplicaSnapshot, RunSnapshot
from sluice.report.run_record import AccuracyPoint
from tests.support.run_folder import ACCOUNTING, ACCOUNTS, STEPS

REPLICA = ReplicaSnapshot("rollout-0", "127.0.0.1:7", "serving", 3, 256, 120, 6412.2, 0.3)


def snapshot(
    metrics: Mapping[str, float], *, version: int | None = 3, awaited: tuple[AwaitedPeer, ...] = ()
) -> RunSnapshot:
    replicas = (REPLICA,) if version is not None else ()
    return RunSnapshot("waiting for batch", 7.2, 3, 60, version, replicas, metrics, {}, awaited)


def rendered(shown: RunSnapshot, accuracy: AccuracyPoint | None = None) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(run_table(shown, accuracy))
    return captured.get()


METRICS = {name: value for name, value in STEPS[0].items() if value is not None}


def test_the_table_shows_all_that_the_run_is_watched_for_within_80_columns() -> None:
    text = rendered(snapshot(METRICS), AccuracyPoint(2, 0.625))
    words = " ".join(text.split())
    for part in (
        "step 3/60",
        "waiting for batch (7 s)",
        "policy version 3",
        "reward -0.50",
        "held-out accuracy 0.625",
        "kept/right/wrong 4/1/2",
        "generated÷trained 1.67",
        "staleness 0",
        "tokens/s 12,346",
        "trainer idle 40%",
        "rollout idle 10%",
        "s/step 2.25",
        "rollout-0 serving 3 120/256 6,412 30%",
    ):
        assert part in words
    assert "…" not in text


def test_the_books_stand_below_within_80_columns() -> None:
    accounting = {**ACCOUNTS, **ACCOUNTING}
    words = " ".join(rendered(replace(snapshot(METRICS), accounts=accounting)).split())
    assert "tokens 3,000 trained 60.0 %, filtered all right 25.0 %, pending 15.0 %" in words
    assert "trainer 4 s training 50.0 %, waiting for batch 37.5 %; residual 12.5 %" in words
    assert "rollout 10 s generating 90.0 %, idle 10.0 %; residual 0.0 %" in words
    assert "residual" not in rendered(snapshot(METRICS))


def test_before_the_first_step_there_are_dashes_and_no_replicas() -> None:
    text = rendered(snapshot({}, version=None))
    assert "policy version none" in text
    assert "replica" not in text
    assert " ".join(text.split()).count(" -") >= 8


def test_only_long_waits_are_told() -> None:
    awaited = (AwaitedPeer("replica a", "generating", 11.0), AwaitedPeer("scorers", "grading", 0.5))
    text = rendered(snapshot(METRICS, awaited=awaited))
    assert "waiting for replica a: generating (11 s)" in text
    assert "scorers" not in text


def test_a_finished_step_is_one_plain_line() -> None:
    line = step_line(1, 60, METRICS)
    assert line.startswith("step 1/60  reward -0.50  kept/right/wrong 4/1/2")
    assert "\n" not in line
    assert step_line(1, 60, {}).endswith("s/step -  version 1  replicas -")


def test_the_plain_line_tells_the_version_and_what_the_replicas_serve() -> None:
    assert step_line(4, 60, {"rollout/replicas": 3.0}).endswith("version 4  replicas 3")
    versions = ((4, "serving"), (4, "serving"), (3, "serving"), (-1, "pending"))
    fleet = tuple(replace(REPLICA, version=v, state=state) for v, state in versions)
    assert step_line(4, 60, {}, fleet).endswith("version 4  replicas 3 (2 at 4, 1 at 3)")
