"""The strategy `rounds` in the loop: waves, leases that are formed again, another trainer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from services.reward.app import RewardApp
from services.reward.generation.request import GroupRequest
from sluice.config.run import RunConfig
from sluice.errors import BatchUnfillableError, DeadlineError
from sluice.types import TrainBatch
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit

MIXED, WRONG = "answer=1 right=1", "answer=1 right=0"


def config(num_waves: int = 0, **sections: Any) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2, "gen_batch_size": 4},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": num_waves}},
        "sluice": {"sampling": {"strategy": "rounds"}, **sections},
    }
    return msgspec.convert(tree, RunConfig)


async def publish(app: RewardApp, version: int, trainer: str = "trainer") -> None:
    await app.loop.announce(trainer, version, [replica("a", version)], None)


def ids(batch: TrainBatch) -> list[str]:
    return [group.prompt_id for group in batch.groups]


def ends(app: RewardApp) -> dict[str, int]:
    accounts = app.ledger
    assert accounts.num_submitted == sum(accounts.by_end.values()) + accounts.num_pending
    return {end.value: count for end, count in accounts.by_end.items() if count}


async def test_surplus_ends_and_the_next_wave_waits_for_the_next_policy() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        session = submit(app, [MIXED] * 12)
        await publish(app, 0)
        batch = await app.loop.batches.take(1, 0, 60)
        assert ids(batch) == ["p0", "p1"]
        assert ends(app) == {"dropped_surplus": 2}
        app.loop.batches.acknowledge(batch.batch_id, 1)
        assert len(client.calls) == 4
        client.versions["a"] = 1
        await publish(app, 1)
        assert ids(await app.loop.batches.take(2, 1, 60)) == ["p4", "p5"]
        assert session.num_open == 12 - 2 - 4


async def test_a_voided_lease_needs_no_further_wave() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 12)
        await publish(app, 0)
        old = await app.loop.batches.take(1, 0, 60)
        with pytest.raises(DeadlineError):  # of another version: the groups are too old for it
            await app.loop.batches.take(2, -1, 0.05)
        again = await app.loop.batches.take(1, 0, 60)
        assert again.batch_id != old.batch_id
        assert ids(again) == ids(old)
        assert len(client.calls) == 4


async def test_another_trainer_begins_with_a_first_wave() -> None:
    gate = asyncio.Event()

    async def hold(_name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.prompt_id == "p3":
            await gate.wait()

    client = ScriptedClient(before_sample=hold)
    async with running_app(config(num_waves=1), client) as app:
        submit(app, [MIXED] * 8)
        await publish(app, 0)
        await settled(lambda: app.groups.num_kept == 3)
        gate.set()
        await publish(app, 0, "another")
        assert ids(await app.loop.batches.take(1, 0, 60)) == ["p0", "p1"]
        assert len(client.calls) == 8
        assert ends(app) == {"dropped_surplus": 2}


async def test_a_wave_that_keeps_too_few_is_an_error_for_the_trainer_that_takes_a_batch() -> None:
    client = ScriptedClient()
    async with running_app(config(num_waves=2), client) as app:
        submit(app, [WRONG] * 7 + [MIXED] * 5)
        await publish(app, 0)
        with pytest.raises(BatchUnfillableError, match=r"Generated too many\. .*1 of 2 groups"):
            await app.loop.batches.take(1, 0, 60)
        with pytest.raises(BatchUnfillableError):
            await app.loop.batches.take(1, 0, 60)
        assert len(client.calls) == 8
