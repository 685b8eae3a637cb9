"""Lost prompts are found by what the stages hold, not by sums that add up by construction."""

from __future__ import annotations

import asyncio

import msgspec

from services.reward.app import RewardApp
from services.reward.generation.request import GroupRequest
from services.reward.group_table import GroupState
from sluice.config.run import RunConfig
from sluice.types import PromptEnd
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit


def config() -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True}},
        "sluice": {"asynchrony": {"max_staleness": 1}},
    }
    return msgspec.convert(tree, RunConfig)


def lost(app: RewardApp) -> float:
    return app.statistics()["reward/prompts_lost"]


async def test_a_running_loop_loses_nothing_and_counts_what_the_trainer_acknowledged() -> None:
    client = ScriptedClient()

    async def look(_name: str, _request: GroupRequest, _index: int) -> None:
        assert lost(app) == 0

    client.before_sample = look
    async with running_app(config(), client) as app:
        assert app.statistics()["reward/groups_acknowledged"] == 0
        submit(app, [f"answer=1 right={i % 3}" for i in range(24)])
        for step in range(1, 4):
            client.versions["a"] = step - 1
            await app.loop.announce("trainer", step - 1, [replica("a", step - 1)], None)
            batch = await app.loop.batches.take(step, step - 1, 60)
            assert lost(app) == 0
            app.loop.batches.acknowledge(batch.batch_id, step)
            app.loop.batches.acknowledge(batch.batch_id, step)
            assert lost(app) == 0
        await app.loop.announce("another", 0, [replica("a", 0)], None)
        assert lost(app) == 0
        assert app.statistics()["reward/groups_acknowledged"] == 6
        assert app.statistics()["reward/batches_acknowledged"] == 3


async def test_a_prompt_that_falls_out_of_a_stage_is_reported() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, ["answer=1 right=1"] * 2)
        await app.loop.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: app.groups.num_kept == 2)
        app.groups["p1"].graded = None
        assert lost(app) == 1


async def test_a_prompt_that_nobody_will_issue_or_run_is_reported() -> None:
    client = ScriptedClient()

    async def hold(_name: str, _request: GroupRequest, _index: int) -> None:
        await asyncio.Event().wait()

    client.before_sample = hold
    async with running_app(config(), client) as app:
        submit(app, ["answer=1 right=1"] * 2)
        await settled(lambda: app.sources[""].prompts.num_waiting == 2)
        assert lost(app) == 0
        assert await app.sources[""].prompts.next_prompt(0, 0.0) is not None
        assert lost(app) == 1
        await app.loop.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: app.groups.num_in_flight == 1)
        assert lost(app) == 1
        running = app.groups.in_state(GroupState.GENERATING)[0]
        task, running.task = running.task, None
        assert lost(app) == 2
        running.task = task


async def test_prompts_that_the_ledger_and_the_groups_do_not_share_are_reported() -> None:
    async with running_app(config(), ScriptedClient()) as app:
        submit(app, ["answer=1 right=1"])
        app.ledger.end("p0", PromptEnd.DROPPED_FAILED)
        assert lost(app) == 1
