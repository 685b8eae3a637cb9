"""A batch on policy that is filled on average withdraws what it is full without."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from services.reward.assembly import RewardLoop
from services.reward.dispatcher import GroupRequest
from sluice.algorithm.admission import YieldEstimate
from sluice.algorithm.withdrawals import CLAIM_AFTER
from sluice.config.run import RunConfig
from sluice.types import TrainBatch
from tests.support.reward_loop import ScriptedClient, replica, running_loop, settled, submit

MIXED, WRONG = "answer=1 right=1", "answer=1 right=0"
SLOW = "p0"
TWO_THIRDS = YieldEstimate(prior_yield=0.67, prior_weight=1e6)
"""Of three groups that run for a batch of two, one is withdrawn."""


def config(**sampling: Any) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True}},
        "sluice": {"sampling": {"on_policy_fill": "expected", **sampling}},
    }
    return msgspec.convert(tree, RunConfig)


class SlowPrompt:
    """One prompt's second sample waits until it is let go; others' come when all have begun."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(self, _name: str, request: GroupRequest, index: int) -> None:
        if request.prompt.prompt_id == SLOW and index == 1:
            await self.gate.wait()
        for _ in range(20):
            await asyncio.sleep(0)


async def publish(loop: RewardLoop, client: ScriptedClient, version: int) -> None:
    client.versions["a"] = version
    await loop.pipeline.announce("trainer", version, [replica("a", version)], None)


async def train(loop: RewardLoop, client: ScriptedClient, step: int) -> TrainBatch:
    batch = await loop.pipeline.batches.take(step, step - 1, 5)
    loop.pipeline.batches.acknowledge(batch.batch_id, step)
    await publish(loop, client, step)
    return batch


def ids(batch: TrainBatch) -> set[str]:
    return {group.prompt_id for group in batch.groups}


async def test_what_a_full_batch_does_not_need_is_drawn_anew_by_the_next_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = SlowPrompt()
    client = ScriptedClient(before_sample=slow)
    async with running_loop(config(), client) as loop:
        loop.strategy.estimate = TWO_THIRDS
        submit(loop, [MIXED] * 4)
        await publish(loop, client, 0)
        first = await train(loop, client, 1)
        assert SLOW not in ids(first)
        slow.gate.set()
        second = await train(loop, client, 2)
        assert ids(first) | ids(second) == {"p0", "p1", "p2", "p3"}
        assert SLOW in client.cancelled
        for batch in (first, second):
            assert batch.statistics["train/staleness_max"] == 0
            assert batch.statistics["train/surplus_discarded"] == 0
        tokens = loop.recorder.totals()
    assert tokens["reward/tokens/withdrawn"] == 8  # the sample that had come
    assert tokens["reward/tokens/stale"] == 0
    assert "starts again" not in caplog.text  # nothing that anybody should look at


async def test_a_prompt_that_was_withdrawn_too_often_is_waited_for() -> None:
    slow = SlowPrompt()
    client = ScriptedClient(before_sample=slow)
    async with running_loop(config(), client) as loop:
        loop.strategy.estimate = TWO_THIRDS
        submit(loop, [MIXED] * (2 * CLAIM_AFTER + 3))
        await publish(loop, client, 0)
        for step in range(1, CLAIM_AFTER + 1):
            assert SLOW not in ids(await train(loop, client, step))
        await settled(lambda: loop.batcher.num_kept == 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert loop.batcher.num_kept == 1  # the other place is claimed
        slow.gate.set()
        assert SLOW in ids(await train(loop, client, CLAIM_AFTER + 1))
        assert client.cancelled.count(SLOW) == CLAIM_AFTER


async def test_a_claim_that_comes_to_nothing_gives_its_place_to_another() -> None:
    slow = SlowPrompt()
    client = ScriptedClient(before_sample=slow)
    async with running_loop(config(), client) as loop:
        loop.strategy.estimate = TWO_THIRDS
        submit(loop, [WRONG, *[MIXED] * (2 * CLAIM_AFTER + 2)])
        await publish(loop, client, 0)
        for step in range(1, CLAIM_AFTER + 1):
            await train(loop, client, step)
        await settled(lambda: loop.batcher.num_kept == 1)
        slow.gate.set()
        assert len(ids(await train(loop, client, CLAIM_AFTER + 1))) == 2
        assert loop.ledger.accounts().by_end["filtered_all_wrong"] == 1


async def test_an_exact_batch_draws_nothing_in_vain_and_waits() -> None:
    slow = SlowPrompt()
    client = ScriptedClient(before_sample=slow)
    async with running_loop(config(on_policy_fill="exact"), client) as loop:
        loop.strategy.estimate = TWO_THIRDS
        submit(loop, [MIXED] * 4)
        await publish(loop, client, 0)
        await settled(lambda: loop.batcher.num_kept == 1)
        assert {prompt_id for _, prompt_id, _ in client.calls} == {"p0", "p1"}
        slow.gate.set()
        assert ids(await train(loop, client, 1)) == {"p0", "p1"}
        assert not client.cancelled
