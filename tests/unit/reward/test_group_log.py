"""The log of groups: one line for each group that ended, and never a wait for the disk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from services.reward.app import RunFiles
from services.reward.records.group_log import GroupLog, SampleDumps
from services.reward.servicer import RewardServicer
from sluice.algorithm.sampling.attempt import Attempt
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.types import ChatMessage, Prompt, PromptEnd, PromptOrigin, RolloutGroup, Scored
from tests.support.client_prompt import client_prompt
from tests.support.group_events import group_ended
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit
from tests.support.scripted_rollout import PROMPT_TOKENS, rollout_of

KEYS = (
    *("prompt_id", "key", "end", "right", "scored", "tokens", "version", "oldest_version"),
    *("started_s", "generated_s", "ended_s", "replicas", "probes", "probability", "step"),
    "instance_id",
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_group_that_failed_leaves_a_line_with_what_is_known(tmp_path: Path) -> None:
    seconds = iter([10.0, 14.0])
    log = GroupLog(tmp_path / "run" / "groups.jsonl", 16, lambda: next(seconds))
    prompt, attempt = client_prompt(), Attempt("aa", 3, None, 4, probability=0.25)
    log.observe(
        group_ended(prompt, attempt=attempt, version=7, started_s=11.5, replicas=("a", "b"))
    )
    log.close()
    (line,) = lines(tmp_path / "run" / "groups.jsonl")
    assert tuple(line) == KEYS
    assert line.pop("instance_id")
    assert line == {
        "prompt_id": prompt.prompt_id,
        "key": "aa",
        "end": "dropped_failed",
        "right": 0,
        "scored": 0,
        "tokens": [],
        "version": 7,
        "oldest_version": None,
        "started_s": 1.5,
        "generated_s": None,
        "ended_s": 4.0,
        "replicas": ["a", "b"],
        "probes": 4,
        "probability": 0.25,
        "step": None,
    }


def test_a_line_names_the_start_of_the_service_that_its_times_are_of(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    for log in (GroupLog(path), GroupLog(path)):
        for _ in range(2):
            log.observe(group_ended())
        log.close()
    first, second, third, fourth = (line["instance_id"] for line in lines(path))
    assert first == second != third == fourth


def test_a_line_that_a_full_disk_or_a_kill_cut_off_never_joins_the_next_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_bytes(b'{"prompt_id":"cut o')
    log = GroupLog(path)
    log.observe(group_ended(client_prompt(prompt_id="whole")))
    log.close()
    _, line = path.read_bytes().splitlines()
    assert json.loads(line)["prompt_id"] == "whole"


def test_a_prompt_that_never_started_leaves_no_line(tmp_path: Path) -> None:
    log = GroupLog(tmp_path / "groups.jsonl")
    log.observe(group_ended(end=PromptEnd.SKIPPED, version=None))
    log.close()
    assert not (tmp_path / "groups.jsonl").exists()


def test_a_group_that_cannot_be_logged_costs_its_own_line_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seconds: Iterator[Any] = iter([0.0, None, 1.0, 2.0])  # no time for the first group
    file = tmp_path / "groups.jsonl"
    log = GroupLog(file, 16, lambda: next(seconds))
    for name, key in (("defect", "aa"), ("no text", "\ud800"), ("whole", "aa")):
        attempt = Attempt(key, 3, None, 4)
        log.observe(group_ended(client_prompt(prompt_id=name), attempt=attempt))
    log.close()
    assert [line["prompt_id"] for line in lines(file)] == ["whole"]
    assert "group defect: its line not logged" in caplog.text
    assert "group no text: its line not logged" in caplog.text


def test_a_log_that_cannot_be_written_is_reported_once_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = GroupLog(tmp_path / "file" / "groups.jsonl")
    for _ in range(3000):
        log.observe(group_ended(end=PromptEnd.TRAINED))
    log.close()
    (line,) = [line for line in caplog.messages if "groups do not reach" in line]
    assert "free the disk or the folder" in line


async def test_the_loop_logs_kept_and_filtered_groups_as_they_end(tmp_path: Path) -> None:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "algorithm": {"filter_groups": {"enable": True}},
    }
    path = tmp_path / "groups.jsonl"
    log = GroupLog(path)
    files = RunFiles(log=log)
    config = msgspec.convert(tree, RunConfig)
    async with running_app(config, ScriptedClient(), files=files) as app:
        submit(app, ["answer=1 right=0", "answer=1 right=1", "answer=1 right=3"])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        batch = await app.loop.batches.take(1, 0, 60)
        app.loop.batches.acknowledge(batch.batch_id, 1)
    log.close()
    found = {line["prompt_id"]: line for line in lines(path)}
    assert {name: line["end"] for name, line in found.items()} == {
        "p0": "filtered_all_wrong",
        "p1": "trained",
        "p2": "trained",
    }
    assert [found[name]["right"] for name in ("p0", "p1", "p2")] == [0, 1, 3]
    assert all(line["tokens"] == [8] * 4 and line["scored"] == 4 for line in found.values())
    assert all(line["oldest_version"] == line["version"] == 0 for line in found.values())
    for line in found.values():
        started, generated, ended = (
            line[f"{name}_s"] for name in ("started", "generated", "ended")
        )
        assert started <= generated <= ended  # type: ignore[operator]


async def test_samples_of_a_trained_batch_are_written_though_the_acknowledgement_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "trainer": {"rollout_data_dir": str(tmp_path)},
    }
    async with running_app(msgspec.convert(tree, RunConfig), ScriptedClient()) as app:
        submit(app, ["answer=1 right=1"] * 2)
        await app.loop.announce("trainer", 0, [replica("a")], None)
        batch = await app.loop.batches.take(1, 0, 60)
        servicer, context = RewardServicer(app, RolloutConfig(), 16), cast("Any", None)
        request = reward.AcknowledgeBatchRequest(batch_id=batch.batch_id, step=1)
        with monkeypatch.context() as patched:
            patched.setattr(app.ledger, "durable", asyncio.Event().wait)  # a slow disk
            async with asyncio.TaskGroup() as tasks:
                given_up = tasks.create_task(servicer.AcknowledgeBatch(request, context))
                await settled(lambda: bool(app.ledger.by_end[PromptEnd.TRAINED]))
                given_up.cancel()
        await servicer.AcknowledgeBatch(request, context)
        await settled((tmp_path / "1.jsonl").exists)
    assert len(lines(tmp_path / "1.jsonl")) == 4


@pytest.mark.parametrize(
    ("text", "is_json", "value"),
    [("72", False, "72"), ("72", True, 72), ('{"target": ["a"]}', True, {"target": ["a"]})],
)
def test_dumps_hold_the_ground_truth_as_the_row_does(
    text: str, is_json: bool, value: object
) -> None:
    messages = (ChatMessage("user", "?"),)
    prompt = Prompt("p", 0, messages, "mine", text, PromptOrigin.DATASET, 0, truth_is_json=is_json)
    group = RolloutGroup(prompt, PROMPT_TOKENS, (rollout_of("text", 0, 0, 0, 3),))
    dumps = SampleDumps(None, Path("unused"))
    (sample,) = dumps.validation_rows(group, (Scored(1.0, 1.0, {}),))
    assert sample.gts == value
