"""What the run's files and metrics show of episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.reward.grading.grader import Grader
from services.reward.group_table import GroupEnding
from services.reward.records.episode_counts import (
    MAX_ENVIRONMENTS,
    EnvironmentNames,
    EpisodeStatistics,
    seconds_of,
)
from services.reward.records.group_log import GroupLog
from sluice.telemetry.metric_names import find_metric
from sluice.telemetry.samples import SampleArchive, sampled_group, transcript
from sluice.types import (
    ChatMessage,
    EpisodeEnd,
    Failed,
    FailureKind,
    GradedGroup,
    Prompt,
    PromptEnd,
    PromptOrigin,
    Rollout,
    RolloutGroup,
)
from tests.support.client_prompt import client_prompt
from tests.support.group_events import group_ended
from tests.support.reward_app import InlineScorer
from tests.support.scripted_environment import (
    ScriptedEnvironment,
    group_request,
    jar_policy,
    playing,
)
from tests.support.scripted_rollout import PROMPT_TOKENS, rollout_of

DOWN = Failed(FailureKind.ENVIRONMENT, "down")


async def played(folder: Path) -> GradedGroup:
    async with playing(folder, jar_policy("C", "D"), ScriptedEnvironment()) as world:
        group = await world.generator.generate(group_request(2))
    return await Grader(InlineScorer(), None).grade(group)


async def test_the_log_of_groups_and_the_archive_show_turns(tmp_path: Path) -> None:
    graded = await played(tmp_path)
    log = GroupLog(
        tmp_path / "groups.jsonl",
        2,
        samples=SampleArchive(tmp_path / "samples", 1 << 20),
        max_chars=2000,
        environments=EnvironmentNames("jars", by_default=True),
    )
    log.observe(group_ended(client_prompt(), graded=graded))
    log.close()
    (line,) = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert json.loads(line)["environment"] == "jars"
    first, _ = json.loads(line)["episodes"]
    rollout = graded.group.rollouts[0]
    assert first["seconds"].keys() == {"queue", "model", "environment"}
    assert first == {
        "turns": 3,
        "roots": 1,
        "read": rollout.num_context_tokens,
        "end": "done",
        "calls": {"look": 2},
        "seconds": first["seconds"],
    }
    (archived,) = (tmp_path / "samples" / "00000001.jsonl").read_text().splitlines()
    assert json.loads(archived)["environment"] == "jars"
    response = json.loads(archived)["responses"][0]
    assert response["episode_end"] == "done"
    called, answered, _ = response["turns"]
    assert '"name": "look"' in called["text"]
    assert (answered["read"], answered["parent"]) == ("[tool] 0", 0)
    assert answered["read_tokens"] == rollout.turns[1].context.size
    assert transcript(rollout).splitlines()[-2:] == ["[tool] 1", "Answer: 1"]


async def test_metrics_count_turns_ends_and_calls_of_offered_tools(tmp_path: Path) -> None:
    graded = await played(tmp_path)
    counts = EpisodeStatistics({"look"}, EnvironmentNames(by_default=True))
    counts.count_graded(
        graded.group.prompt, zip(graded.group.rollouts, graded.outcomes, strict=True)
    )
    counts.count_graded(client_prompt(), [(rollout_of("", 2, 0, 1, 0), DOWN)])
    found = counts.take()
    assert found["train/episode_turns_mean"] == 3.0
    assert found["train/episode_roots_mean"] == 1.0
    assert found["train/tool_calls/look"] == 4.0
    assert found["train/unknown_tool_calls"] == 0.0
    assert (found["train/episode_ends/done"], found["train/episode_ends/failed"]) == (2.0, 1.0)
    assert found["train/episode_seconds/environment"] > 0.0
    assert counts.take() == {}


async def test_names_that_a_policy_makes_up_become_no_metrics(tmp_path: Path) -> None:
    graded = await played(tmp_path)
    counts = EpisodeStatistics({"other"}, EnvironmentNames(by_default=True))
    counts.count_graded(
        graded.group.prompt, zip(graded.group.rollouts, graded.outcomes, strict=True)
    )
    found = counts.take()
    assert "train/tool_calls/look" not in found
    assert found["train/unknown_tool_calls"] == 4.0


def named(environment: str) -> Prompt:
    """A row that names its environment."""
    return replace(client_prompt(), extra_info={"agent_name": environment})


async def test_metrics_count_ends_failures_turns_time_and_errors_by_environment(
    tmp_path: Path,
) -> None:
    graded = await played(tmp_path)
    counts = EpisodeStatistics({"look"}, EnvironmentNames("served"))
    first, second = graded.group.rollouts
    failed_call = ChatMessage("tool", "Error: ValueError", is_error=True)
    asked, read, *rest = second.turns
    second = replace(second, turns=(asked, replace(read, observed=(failed_call,)), *rest))
    counts.count_graded(named("jars"), [(first, graded.outcomes[0])])
    counts.count_graded(named("tool_agent"), [(second, Failed(FailureKind.SCORER_TIMEOUT, ""))])
    counts.count_graded(named("jars"), [(rollout_of("", 2, 0, 1, 0), DOWN)])
    found = counts.take()
    jars, served = "train/environments/jars", "train/environments/served"
    assert (found[f"{jars}/ends/done"], found[f"{jars}/ends/max_turns"]) == (1.0, 0.0)
    assert found[f"{jars}/failed/environment"] == 1.0
    assert found[f"{served}/failed/scorer_timeout"] == 1.0
    assert (found[f"{jars}/turns_mean"], found[f"{served}/turns_mean"]) == (3.0, 3.0)
    assert (found[f"{jars}/tool_errors"], found[f"{served}/tool_errors"]) == (0.0, 1.0)
    parts = {part: found[f"{jars}/seconds/{part}"] for part in ("queue", "model", "environment")}
    assert parts == pytest.approx(seconds_of(first))
    assert not [name for name in found if find_metric(name) is None]


async def test_names_of_environments_that_clients_make_up_are_bounded(tmp_path: Path) -> None:
    graded = await played(tmp_path)
    sample = (graded.group.rollouts[0], graded.outcomes[0])
    counts = EpisodeStatistics(environments=EnvironmentNames("served"))
    for number in range(3 * MAX_ENVIRONMENTS):
        counts.count_graded(named(f"never-{number}"), [(rollout_of("", 2, 0, 1, 0), DOWN)])
        counts.count_graded(named(f"environment {number}"), [sample])
    counts.count_graded(named("served"), [sample])
    names = {name.split("/")[2] for name in counts.take() if "/environments/" in name}
    assert len(names) == MAX_ENVIRONMENTS + 1
    assert {"served", "other", "environment 0"} < names
    assert not [name for name in names if name.startswith("never")]


def test_an_environment_that_fails_before_its_first_end_is_counted_by_its_name() -> None:
    counts = EpisodeStatistics(environments=EnvironmentNames("served"))
    row = replace(named("jars"), origin=PromptOrigin.DATASET)
    counts.count_graded(
        row, [(rollout_of("", 2, 0, 1, 0), Failed(FailureKind.ENGINE_ERROR, "lost"))]
    )
    counts.count_ungenerated(row, FailureKind.ENVIRONMENT, 4)
    counts.count_ungenerated(named("made up"), FailureKind.AGENT, 2)
    counts.count_ungenerated(client_prompt(), FailureKind.ABORTED, 2)
    found = counts.take()
    assert {name: count for name, count in found.items() if "failed" in name} == {
        "train/environments/jars/failed/engine_error": 1.0,
        "train/environments/jars/failed/environment": 4.0,
        "train/environments/other/failed/agent": 2.0,
        "train/episode_ends/failed": 6.0,
    }


def test_a_group_that_could_not_be_generated_counts_for_its_environment() -> None:
    counts = EpisodeStatistics(environments=EnvironmentNames("served"))
    event = group_ended(replace(named("jars"), origin=PromptOrigin.DATASET))
    event.group.num_ungraded = 4
    event.group.ending = GroupEnding(PromptEnd.DROPPED_FAILED, "down", failed=DOWN)
    counts.observe(event)
    assert counts.take()["train/environments/jars/failed/environment"] == 4.0


@pytest.mark.parametrize(
    ("chosen", "rows_choose", "shown"),
    [
        ("Calculator", False, "calc"),
        ("shop", True, "shop"),
        ("tool_agent", True, "calc"),
        ("", True, "calc"),
        ("a\nb", True, "other"),
        ("ends/done", True, "ends_done"),
        ("single_turn_agent", True, None),
        ("x" * 500, True, "x" * 64),
    ],
)
def test_a_row_s_environment_has_a_short_printable_name(
    chosen: str, shown: str | None, *, rows_choose: bool
) -> None:
    assert EnvironmentNames("calc", rows_choose, by_default=True).of(named(chosen)) == shown


def test_a_single_answer_of_an_episode_shows_what_it_read_and_where_its_time_went() -> None:
    (turn,) = rollout_of("42", 0, 0, 1, 4).turns
    read = ChatMessage("user", "Guess.")
    one = Rollout(0, (replace(turn, observed=(read,), seconds={"model": 2.0}),), EpisodeEnd.DONE)
    group = RolloutGroup(client_prompt(), PROMPT_TOKENS, (one, rollout_of("text", 1, 0, 1, 4)))
    failed = Failed(FailureKind.UNSCORABLE, "")
    shown = sampled_group(
        client_prompt(),
        PromptEnd.TRAINED,
        GradedGroup(group, (failed, failed)),
        version=0,
        step=1,
        ended_at=0.0,
        replicas=[],
        max_chars=4000,
    )
    (played_turn,), plain = shown.responses[0].turns, shown.responses[1].turns
    assert (played_turn.read, played_turn.seconds) == ("[user] Guess.", {"model": 2.0})
    assert plain == []


def test_a_run_without_an_environment_has_none_of_these() -> None:
    rollout = rollout_of("text", 0, 0, 1, 4)
    counts = EpisodeStatistics()
    counts.count_graded(client_prompt(), [(rollout, Failed(FailureKind.UNSCORABLE, ""))])
    assert counts.take() == {}
    assert transcript(rollout) == "text"


@pytest.mark.parametrize("num_turns", [2, 60])
def test_the_texts_of_many_turns_stay_bounded(num_turns: int) -> None:
    (first,) = rollout_of("x" * 10_000, 0, 0, 1, 4).turns
    later = (replace(first, parent=number) for number in range(num_turns - 1))
    group = RolloutGroup(client_prompt(), PROMPT_TOKENS, (Rollout(0, (first, *later)),))
    shown = sampled_group(
        client_prompt(),
        PromptEnd.TRAINED,
        GradedGroup(group, (Failed(FailureKind.UNSCORABLE, ""),)),
        version=0,
        step=1,
        ended_at=0.0,
        replicas=[],
        max_chars=4000,
    )
    turns = shown.responses[0].turns
    assert len(turns) == num_turns
    assert sum(len(each.text) for each in turns) < 4000 + num_turns * 300
