"""What the reward service's watchdog sees of groups that are generated and graded, and how long
it and the trainer wait for agents and environments."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

import sluice
from services.reward.app import RewardApp, RunFiles
from services.reward.episodes.drivers import EpisodeTask
from services.reward.episodes.leases import LeaseManager
from services.reward.generation.request import GroupRequest, Purpose
from services.reward.group_table import GroupTable
from services.reward.servicer import RewardServicer
from services.reward.telemetry import fleet_status, work_state
from sluice.algorithm.episode_rules import Observation
from sluice.api.reward.v1 import reward_pb2
from sluice.config.loading.loader import load_config
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.types import Answer, ChatMessage, FinishReason, Scored
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit
from tests.support.scripted_environment import group_request

SETTINGS = ("data.train_batch_size=1", "actor_rollout_ref.rollout.n=2")


async def test_groups_that_replicas_generate_are_work_that_moves_with_every_sample() -> None:
    released = [asyncio.Event(), asyncio.Event()]

    async def before(_name: str, _request: GroupRequest, index: int) -> None:
        await released[index].wait()

    client = ScriptedClient(before_sample=before)
    async with running_app(load_config(None, SETTINGS), client) as app:
        work = partial(work_state, app, patience_s=600.0)
        assert not work().has_work
        submit(app, ["answer=1 right=1"])
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        await settled(lambda: bool(client.calls))
        before_sample = work()
        assert before_sample.has_work
        assert before_sample.patience_s == 600.0
        assert work().progress == before_sample.progress
        assert ("rollout fleet", 1) in [(wait.peer, wait.count) for wait in work().waits]
        released[0].set()
        await settled(lambda: work().progress != before_sample.progress)
        released[1].set()
        await settled(lambda: not work().has_work)


async def test_groups_whose_replicas_have_left_are_no_work_of_the_service() -> None:
    async def never(_name: str, _request: GroupRequest, _index: int) -> None:
        await asyncio.Event().wait()

    client = ScriptedClient(before_sample=never)
    async with running_app(load_config(None, SETTINGS), client) as app:
        work = partial(work_state, app, patience_s=600.0)
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        submit(app, ["answer=1 right=1"])
        await settled(lambda: bool(client.calls))
        assert work().has_work
        await app.loop.announce("trainer-1", 0, [], None)
        assert not work().has_work
        assert app.groups.counts["generating"] == 1
        assert "rollout fleet" in {wait.peer for wait in work().waits}


async def test_a_trainer_of_another_version_of_sluice_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sluice, "own_version", lambda: "1.2")
    async with running_app(load_config(None, SETTINGS), ScriptedClient()) as app:
        servicer = RewardServicer(app, RolloutConfig(), 16)
        for version in range(3):
            request = reward_pb2.AnnouncePolicyRequest(
                trainer_instance_id="trainer-1", policy_version=version, sluice_version="1.1"
            )
            await servicer.AnnouncePolicy(request, cast("Any", None))
    words = "trainer trainer-1 runs sluice 1.1, and this service 1.2"
    assert [words in line for line in caplog.messages].count(True) == 1


class SlowEnvironments:
    """Environments that open when `opened` is set, and are done at the first answer."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def begin(self, _task: EpisodeTask) -> SlowEnvironments:
        return self

    async def open(self) -> Observation:
        await self.opened.wait()
        return Observation()

    async def step(self, _turn: int, _answer: Answer, _finish: FinishReason) -> Observation:
        return Observation(done=True)

    async def close(self) -> Scored | None:
        return Scored(1.0, 1.0, {"acc": 1.0})

    async def abandon(self) -> None:
        """Nothing is open."""


PLAYED = (*SETTINGS, "actor_rollout_ref.rollout.multi_turn.enable=true")


async def test_an_agent_works_as_long_as_it_may_and_a_replica_only_as_long_as_it_moves() -> None:
    gate, files = asyncio.Event(), RunFiles()

    async def before(_name: str, _request: GroupRequest, _index: int) -> None:
        await gate.wait()

    desk = LeaseManager(files.ledger.leases)
    config = load_config(None, (*PLAYED, "sluice.environment.agents=true"))
    client = ScriptedClient(before_sample=before)
    async with (
        running_app(config, client, files=files, drivers=desk) as app,
        asyncio.TaskGroup() as tasks,
    ):
        work = partial(work_state, app, patience_s=600.0)

        def peers() -> set[str]:
            return {wait.peer for wait in work().waits}

        def phases() -> list[str]:
            return [wait.phase for wait in work().waits]

        submit(app, ["answer=1 right=1"])
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        await settled(lambda: desk.num_offered == 2)
        assert app.groups.counts["generating"] == 1
        assert not work().has_work
        assert peers() == {"agent"}
        assert phases() == ["taking samples"]
        async with desk.leasing(2, 1.0) as (first, _):
            pass
        await settled(lambda: phases() == ["working on samples"])
        assert not work().has_work
        asked = tasks.create_task(
            desk.chat(first.lease_id, "d", first.task.prompt.messages, (), 9), name="asked"
        )
        await settled(lambda: bool(client.calls))
        assert work().has_work
        assert peers() == {"rollout fleet"}
        gate.set()
        await asked
        assert not work().has_work
        assert peers() == {"agent"}
        await app.loop.announce("trainer-1", 0, [], None)
        assert peers() == {"rollout fleet"}


async def test_a_validation_that_replicas_sample_hides_no_agent_that_training_waits_for() -> None:
    gate, files = asyncio.Event(), RunFiles()

    async def before(_name: str, _request: GroupRequest, _index: int) -> None:
        await gate.wait()

    desk = LeaseManager(files.ledger.leases)
    config = load_config(None, (*PLAYED, "sluice.environment.agents=true"))
    client = ScriptedClient(before_sample=before)
    async with (
        running_app(config, client, files=files, drivers=desk) as app,
        asyncio.TaskGroup() as tasks,
    ):
        submit(app, ["answer=1 right=1"])
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        asking = tasks.create_task(app.loop.batches.take(1, 0, 60.0), name="trainer")
        await settled(lambda: desk.num_offered == 2)
        request = group_request(1)
        prompt = replace(request.prompt, messages=(ChatMessage("user", "answer=1 right=1"),))
        validated = replace(request, prompt=prompt, purpose=Purpose.VALIDATION)
        validation = tasks.create_task(app.dispatcher.generate(validated), name="validation")
        await settled(lambda: bool(client.calls))
        assert app.queue.is_busy
        assert work_state(app, 600.0).has_work
        assert [wait.phase for wait in work_state(app, 600.0).waits] == ["taking samples"]
        assert not fleet_status(app, 0).is_starved
        gate.set()
        await validation
        asking.cancel()


async def test_an_environment_that_works_keeps_no_replica_busy() -> None:
    environments = SlowEnvironments()
    config = load_config(None, (*PLAYED, "sluice.environment.path=jars.py"))
    async with (
        running_app(config, ScriptedClient(), drivers=environments) as app,
        asyncio.TaskGroup() as tasks,
    ):
        submit(app, ["answer=1 right=1"])
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        asking = tasks.create_task(app.loop.batches.take(1, 0, 60.0), name="trainer")
        await settled(lambda: app.loop.batches.num_asking > 0)
        await settled(lambda: app.groups.counts["generating"] == 1)
        await settled(lambda: app.dispatcher.outside[Purpose.TRAINING].num_waiting == 2)
        assert not work_state(app, 600.0).has_work
        assert [wait.peer for wait in work_state(app, 600.0).waits] == ["environment"]
        assert not fleet_status(app, 0).is_starved
        environments.opened.set()
        await asking


async def test_what_the_watchdog_asks_every_second_does_not_count_all_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_app(load_config(None, SETTINGS), ScriptedClient()) as app:
        work = partial(work_state, app, patience_s=600.0)
        before = work()
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        monkeypatch.setattr(RewardApp, "statistics", None)
        for walk in ("__iter__", "in_state", "in_order"):
            monkeypatch.setattr(GroupTable, walk, None)
        submit(app, ["answer=1 right=1"])
        await settled(lambda: work().progress != before.progress)
        await settled(lambda: app.groups.num_kept == 1)
        assert app.counters.progress == (0, 2, 16)
