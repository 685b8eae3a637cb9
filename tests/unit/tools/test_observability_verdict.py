"""When `make observability-test` fails: empty dashboards, and alerts that should not fire."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from sluice.telemetry.instruments import INSTRUMENTS
from tests.support.source_tree import ROOT
from tools.compose_test.commands import CommandError
from tools.phases import PhaseError
from tools.observability_test import __main__ as entry
from tools.observability_test.dashboard_queries import (
    ONLY_AFTER_A_FAILURE,
    DashboardQueries,
    shipped_queries,
)
from tools.observability_test.fired_alerts import DOWN, judge
from tools.observability_test.prometheus_server import hurried_copy

PROFILE = ROOT / "deploy" / "observability"
GUIDE = (ROOT / "docs" / "deployment" / "observability.md").read_text(encoding="utf-8")
HEALTHY = "sluice_trainer_reward_mean"
FAILURE = "sum by (limit) (increase(sluice_quota_refusals_total[5m]))"


def test_a_query_is_unanswered_until_it_finds_something() -> None:
    answers: dict[str, list[tuple[dict[str, str], float]]] = {"a": [], "b": [({}, 0.0)]}
    answers["c"] = [({}, math.nan)]  # of which Grafana shows nothing
    dashboards = DashboardQueries(["a", "b", "c"], answers.__getitem__)
    assert dashboards.unanswered() == ["a", "c"]
    answers.update(a=[({}, 1.0)], b=[], c=[({}, math.nan), ({}, 2.0)])
    assert dashboards.unanswered() == []  # b was answered before
    assert dashboards.empty == []


def test_only_counters_of_failures_may_stay_empty_and_they_are_told() -> None:
    dashboards = DashboardQueries([HEALTHY, FAILURE], lambda _: [])
    assert dashboards.unanswered() == [HEALTHY]
    assert dashboards.empty == [HEALTHY, FAILURE]


def test_what_may_be_absent_is_declared_and_the_guide_names_it() -> None:
    declared = {one.name: one for group in INSTRUMENTS.values() for one in group}
    for name in ONLY_AFTER_A_FAILURE:
        assert declared[name].labels
        assert f"`{name}`" in GUIDE


def test_queries_of_all_dashboards_ask_for_one_run() -> None:
    found = shipped_queries(PROFILE / "grafana" / "dashboards", "mine")
    files = sorted((PROFILE / "grafana" / "dashboards").glob("*.json"))
    written = [file.read_text(encoding="utf-8").count('"expr"') for file in files]
    assert len(found) == sum(written)
    assert all('run=~"mine"' in query and "$run" not in query for query in found)
    assert all(json.loads(file.read_text(encoding="utf-8"))["panels"] for file in files)


@pytest.mark.parametrize(
    ("labels", "expected", "wrong"),
    [
        ({"alertname": DOWN, "instance": "rollout-1"}, (DOWN, "rollout-1"), []),
        ({"alertname": DOWN, "instance": "rollout-1"}, None, [f"{DOWN} rollout-1"]),
        ({"alertname": DOWN, "instance": "trainer"}, (DOWN, "rollout-1"), [f"{DOWN} trainer"]),
        (
            {"alertname": "SluiceLoopBlocked", "instance": "rollout-1"},
            (DOWN, "rollout-1"),
            ["SluiceLoopBlocked rollout-1"],
        ),
        (
            {"alertname": "SluicePromptsLost", "run": "run"},
            (DOWN, "rollout-1"),
            ["SluicePromptsLost run"],
        ),
    ],
)
def test_every_alert_but_the_one_that_has_to_fire_is_wrong(
    labels: dict[str, str], expected: tuple[str, str] | None, wrong: list[str]
) -> None:
    assert judge([(labels, 1.0)], expected) == (wrong, [])


def test_an_alert_that_a_slow_machine_brings_about_is_told_and_the_guide_names_it() -> None:
    names = ["SluiceQueueStarved", "SluiceTrainerStarved"]
    fired = [({"alertname": name, "run": "run"}, 1.0) for name in reversed(names)]
    assert judge(fired, None) == ([], names)
    test = GUIDE.partition("## The test")[2].partition("\n## ")[0]
    assert [name for name in names if f"`{name}`" not in test] == []


@asynccontextmanager
async def no_run(*_: object) -> AsyncIterator[None]:
    """Its tasks wrap what is raised in the block, as those of a run do."""
    async with asyncio.TaskGroup():
        yield


@pytest.mark.parametrize("error", [PhaseError("no targets"), CommandError("no program")])
def test_a_failure_during_the_run_is_told_in_the_last_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(entry, "find_programs", lambda: "a promtool")
    monkeypatch.setattr(entry, "_check_files", lambda _: None)
    monkeypatch.setattr(entry, "live_run", no_run)
    monkeypatch.setattr(entry, "until", fails)
    assert entry.main([]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["passed"], last["problems"]) == (False, [str(error)])


def test_a_defect_during_the_run_is_no_failed_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_broken(*_: object, **__: object) -> None:
        raise KeyError("instance")

    monkeypatch.setattr(entry, "find_programs", lambda: "a promtool")
    monkeypatch.setattr(entry, "_check_files", lambda _: None)
    monkeypatch.setattr(entry, "live_run", no_run)
    monkeypatch.setattr(entry, "until", is_broken)
    with pytest.raises(ExceptionGroup) as caught:
        entry.main([])
    assert caught.group_contains(KeyError)


def test_hurried_alerts_keep_the_order_in_which_they_wait(tmp_path: Path) -> None:
    source, targets = PROFILE / "prometheus", tmp_path / "targets"
    targets.mkdir()
    config = hurried_copy(source, tmp_path / "hurried", targets)

    def waits(folder: Path) -> dict[str, int]:
        groups = yaml.safe_load((folder / "alerts.yml").read_text(encoding="utf-8"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["alert"]: int(rule.get("for", "0s")[:-1]) for rule in rules}

    shipped, hurried = waits(source), waits(config.parent)
    assert hurried == {name: 4 * minutes for name, minutes in shipped.items()}
    assert len(set(shipped.values())) > 3
    assert set(re.findall(r"(?:interval|timeout): (\w+)", config.read_text("utf-8"))) == {"1s"}
