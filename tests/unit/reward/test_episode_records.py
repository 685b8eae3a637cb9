"""What the run's files and metrics show of episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.reward.grading.grader import Grader
from services.reward.records.group_log import GroupLog
from services.reward.records.statistics import EpisodeStatistics
from sluice.telemetry.samples import SampleArchive, sampled_group, transcript
from sluice.types import Failed, FailureKind, GradedGroup, PromptEnd, Rollout, RolloutGroup
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
        most_chars=2000,
    )
    log.observe(group_ended(client_prompt(), graded=graded))
    log.close()
    (line,) = (tmp_path / "groups.jsonl").read_text().splitlines()
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
    response = json.loads(archived)["responses"][0]
    assert response["episode_end"] == "done"
    called, answered, _ = response["turns"]
    assert '"name": "look"' in called["text"]
    assert (answered["read"], answered["parent"]) == ("[tool] 0", 0)
    assert answered["read_tokens"] == rollout.turns[1].context.size
    assert transcript(rollout).splitlines()[-2:] == ["[tool] 1", "Answer: 1"]


async def test_metrics_count_turns_ends_and_calls_of_offered_tools(tmp_path: Path) -> None:
    graded = await played(tmp_path)
    counts = EpisodeStatistics({"look"})
    down = Failed(FailureKind.ENVIRONMENT, "down")
    counts.graded(zip(graded.group.rollouts, graded.outcomes, strict=True))
    counts.graded([(rollout_of("", 2, 0, 1, 0), down)])
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
    counts = EpisodeStatistics({"other"})
    counts.graded(zip(graded.group.rollouts, graded.outcomes, strict=True))
    found = counts.take()
    assert "train/tool_calls/look" not in found
    assert found["train/unknown_tool_calls"] == 4.0


def test_a_run_without_an_environment_has_none_of_these() -> None:
    rollout = rollout_of("text", 0, 0, 1, 4)
    counts = EpisodeStatistics()
    counts.graded([(rollout, Failed(FailureKind.UNSCORABLE, ""))])
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
        most_chars=4000,
    )
    turns = shown.responses[0].turns
    assert len(turns) == num_turns
    assert sum(len(each.text) for each in turns) < 4000 + num_turns * 300
