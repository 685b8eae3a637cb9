"""Lost prompts are found by what the stages hold, not by sums that add up by construction."""

from __future__ import annotations

import asyncio

import msgspec

from services.reward.app import RewardLoop
from services.reward.generation.request import GroupRequest
from services.reward.group import GroupState
from sluice.config.run import RunConfig
from sluice.types import PromptEnd
from tests.support.reward_loop import ScriptedClient, replica, running_loop, settled, submit


def config() -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True}},
        "sluice": {"asynchrony": {"max_staleness": 1}},
    }
    return msgspec.convert(tree, RunConfig)


def lost(loop: RewardLoop) -> float:
    return loop.statistics()["reward/prompts_lost"]


async def test_a_running_loop_loses_nothing_and_counts_what_the_trainer_acknowledged() -> None:
    client = ScriptedClient()

    async def look(_name: str, _request: GroupRequest, _index: int) -> None:
        assert lost(loop) == 0

    client.before_sample = look
    async with running_loop(config(), client) as loop:
        assert loop.statistics()["reward/groups_acknowledged"] == 0
        submit(loop, [f"answer=1 right={i % 3}" for i in range(24)])
        for step in range(1, 4):
            client.versions["a"] = step - 1
            await loop.pipeline.announce("trainer", step - 1, [replica("a", step - 1)], None)
            batch = await loop.pipeline.batches.take(step, step - 1, 5)
            assert lost(loop) == 0
            loop.pipeline.batches.acknowledge(batch.batch_id, step)
            loop.pipeline.batches.acknowledge(batch.batch_id, step)
            assert lost(loop) == 0
        await loop.pipeline.announce("another", 0, [replica("a", 0)], None)
        assert lost(loop) == 0
        assert loop.statistics()["reward/groups_acknowledged"] == 6
        assert loop.statistics()["reward/batches_acknowledged"] == 3


async def test_a_prompt_that_falls_out_of_a_stage_is_reported() -> None:
    client = ScriptedClient()
    async with running_loop(config(), client) as loop:
        submit(loop, ["answer=1 right=1"] * 2)
        await loop.pipeline.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: loop.groups.num_kept == 2)
        loop.groups["p1"].graded = None
        assert lost(loop) == 1


async def test_a_prompt_that_nobody_will_issue_or_run_is_reported() -> None:
    client = ScriptedClient()

    async def hold(_name: str, _request: GroupRequest, _index: int) -> None:
        await asyncio.Event().wait()

    client.before_sample = hold
    async with running_loop(config(), client) as loop:
        submit(loop, ["answer=1 right=1"] * 2)
        await settled(lambda: loop.source.num_waiting == 2)
        assert lost(loop) == 0
        assert await loop.source.next_prompt(0, 0.0) is not None
        assert lost(loop) == 1
        await loop.pipeline.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: loop.groups.num_in_flight == 1)
        assert lost(loop) == 1
        running = loop.groups.in_state(GroupState.GENERATING)[0]
        task, running.task = running.task, None
        assert lost(loop) == 2
        running.task = task


async def test_prompts_that_the_ledger_and_the_groups_do_not_share_are_reported() -> None:
    async with running_loop(config(), ScriptedClient()) as loop:
        submit(loop, ["answer=1 right=1"])
        loop.ledger.end("p0", PromptEnd.DROPPED_FAILED)
        assert lost(loop) == 1
