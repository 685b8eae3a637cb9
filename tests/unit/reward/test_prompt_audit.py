"""Lost prompts are found by what the stages hold, not by sums that add up by construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from services.reward.app import RewardLoop
from services.reward.generation.request import GroupRequest
from services.reward.ledger.ledger import Accounts, PromptState
from services.reward.records.statistics import StagePrompts, prompts_lost
from sluice.config.run import RunConfig
from sluice.types import PromptEnd
from tests.support.reward_loop import ScriptedClient, replica, running_loop, settled, submit

HELD = StagePrompts(num_waiting=5, num_in_flight=7, num_kept=3, num_leased=2)
STATES = {
    PromptState.WAITING: 5,
    PromptState.GENERATING: 4,
    PromptState.GRADING: 3,
    PromptState.KEPT: 3,
    PromptState.LEASED: 2,
}


def accounts(num_submitted: int, by_state: Mapping[PromptState, int] = STATES) -> Accounts:
    return Accounts(num_submitted, {PromptEnd.TRAINED: 10}, by_state)


def test_prompts_that_the_stages_hold_are_not_lost() -> None:
    assert prompts_lost(accounts(27), HELD) == 0
    assert prompts_lost(accounts(27), replace(HELD, num_in_flight=8)) == 0


@pytest.mark.parametrize(
    "held",
    [
        replace(HELD, num_waiting=4),
        replace(HELD, num_in_flight=6),
        replace(HELD, num_kept=2),
        replace(HELD, num_leased=1),
        replace(HELD, num_waiting=4, num_kept=4),
    ],
)
def test_a_pending_prompt_that_no_stage_holds_is_lost(held: StagePrompts) -> None:
    assert prompts_lost(accounts(27), held) == 1


@pytest.mark.parametrize("num_submitted", [26, 28])
def test_events_that_do_not_explain_the_states_are_losses(num_submitted: int) -> None:
    assert prompts_lost(accounts(num_submitted), HELD) == 1


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
        await settled(lambda: loop.batcher.num_kept == 2)
        loop.batcher.remove("p1")
        assert lost(loop) == 1
