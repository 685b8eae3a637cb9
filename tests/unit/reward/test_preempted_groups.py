"""A batch on policy that is filled on average preempts what it is full without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from services.reward.generation.request import GenerateEvent, GroupRequest
from services.reward.group_table import GroupState
from sluice.algorithm.groups.staleness import RESERVE_AFTER
from sluice.algorithm.sampling.admission import YieldEstimate
from sluice.config.run import RunConfig
from sluice.types import ReplicaInfo, Rollout, TrainBatch
from tests.support.reward_app import (
    ScriptedClient,
    publish,
    running_app,
    settled,
    submit,
    train,
    turns,
)

MIXED, WRONG = "answer=1 right=1", "answer=1 right=0"
SLOW = "p0"
TWO_THIRDS = YieldEstimate(prior_yield=0.67, prior_weight=1e6)
"""Of three groups that run for a batch of two, one is preempted."""


def config(*, asynchrony: Any = None, **sampling: Any) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True}},
        "sluice": {
            "sampling": {"on_policy_fill": "expected", **sampling},
            "asynchrony": asynchrony or {},
        },
    }
    return msgspec.convert(tree, RunConfig)


class SlowPrompt:
    """One prompt's second sample waits until it is let go; others' come when all have begun."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(self, _name: str, request: GroupRequest, index: int) -> None:
        if request.prompt.prompt_id == SLOW and index == 1:
            await self.gate.wait()
        await turns(20)


class LateClient(ScriptedClient):
    """One prompt's calls send nothing until they are let go."""

    def __init__(self, late: str, **others: Any) -> None:
        super().__init__(**others)
        self._late, self.late, self.begun = late, asyncio.Event(), list[str]()

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout] = (),
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.begun.append(request.prompt.prompt_id)
        if request.prompt.prompt_id == self._late:
            await self.late.wait()
        async with aclosing(super().generate(replica, request, sample_indexes, partials)) as events:
            async for event in events:
                yield event


def ids(batch: TrainBatch) -> set[str]:
    return {group.prompt_id for group in batch.groups}


async def test_what_a_full_batch_does_not_need_is_generated_again_by_the_next_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = SlowPrompt()
    client = ScriptedClient(before_sample=slow)
    async with running_app(config(), client) as app:
        app.sources[""].strategy.estimate = TWO_THIRDS
        submit(app, [MIXED] * 4)
        await publish(app, client, 0)
        first = await train(app, client, 1)
        assert SLOW not in ids(first)
        slow.gate.set()
        second = await train(app, client, 2)
        assert ids(first) | ids(second) == {"p0", "p1", "p2", "p3"}
        assert SLOW in client.cancelled
        for batch in (first, second):
            assert batch.statistics["train/staleness_max"] == 0
            assert batch.statistics["train/surplus_discarded"] == 0
        tokens = app.counters.totals()
    assert tokens["reward/tokens/preempted"] == 8  # the sample that had come
    assert tokens["reward/tokens/stale"] == 0
    assert "starts again" not in caplog.text  # nothing that anybody should look at


async def test_a_prompt_that_was_preempted_too_often_is_waited_for() -> None:
    slow = SlowPrompt()
    client = ScriptedClient(before_sample=slow)
    async with running_app(config(), client) as app:
        app.sources[""].strategy.estimate = TWO_THIRDS
        submit(app, [MIXED] * (2 * RESERVE_AFTER + 3))
        await publish(app, client, 0)
        for step in range(1, RESERVE_AFTER + 1):
            assert SLOW not in ids(await train(app, client, step))
        await settled(lambda: app.groups.num_kept == 1)
        await turns(100)
        assert app.groups.num_kept == 1  # the other place is claimed
        slow.gate.set()
        assert SLOW in ids(await train(app, client, RESERVE_AFTER + 1))
        assert client.cancelled.count(SLOW) == RESERVE_AFTER


async def test_a_claim_that_comes_to_nothing_gives_its_place_to_another() -> None:
    slow = SlowPrompt()
    client = ScriptedClient(before_sample=slow)
    async with running_app(config(), client) as app:
        app.sources[""].strategy.estimate = TWO_THIRDS
        submit(app, [WRONG, *[MIXED] * (2 * RESERVE_AFTER + 2)])
        await publish(app, client, 0)
        for step in range(1, RESERVE_AFTER + 1):
            await train(app, client, step)
        await settled(lambda: app.groups.num_kept == 1)
        slow.gate.set()
        assert len(ids(await train(app, client, RESERVE_AFTER + 1))) == 2
        assert app.ledger.by_end["filtered_all_wrong"] == 1


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
async def test_a_group_that_begins_when_its_batch_has_gone_is_generated_again_and_not_dropped(
    on_stale: str,
) -> None:
    client = LateClient("p2")
    async with running_app(config(asynchrony={"on_stale": on_stale}), client) as app:
        app.sources[""].strategy.estimate = TWO_THIRDS
        submit(app, [MIXED] * 4)
        await publish(app, client, 0)
        batch = await app.loop.batches.take(1, 0, 60)
        client.late.set()  # its first token would be of a version whose batch is at the trainer
        await settled(lambda: app.groups["p2"].state is GroupState.WAITING)
        app.loop.batches.acknowledge(batch.batch_id, 1)
        await publish(app, client, 1)
        assert ids(batch) | ids(await train(app, client, 2)) == {"p0", "p1", "p2", "p3"}
        assert app.ledger.by_end["dropped_stale"] == 0


async def test_a_reservation_in_the_middle_of_a_batch_preempts_a_group_that_runs_for_its_slot() -> (
    None
):
    """Before the group that reserves holds a token: else one group too many would be kept."""
    gates = {name: asyncio.Event() for name in ("p0", "p1", "p2")}

    async def held(_name: str, request: GroupRequest, _index: int) -> None:
        if (gate := gates.get(request.prompt.prompt_id)) is not None:
            await gate.wait()

    client = LateClient("p3", before_sample=held)
    async with running_app(config(), client) as app:
        app.sources[""].strategy.estimate = TWO_THIRDS
        submit(app, [WRONG, *[MIXED] * 5])
        app.groups["p3"].num_preemptions = RESERVE_AFTER
        await publish(app, client, 0)
        gates["p1"].set()
        await settled(lambda: app.groups.num_kept == 1)
        gates["p0"].set()  # filtered, and p3 starts
        await settled(lambda: "p3" in client.begun)
        gates["p2"].set()
        await turns(100)
        assert app.groups.num_kept == 1
        client.late.set()
        batch = await train(app, client, 1)
        assert ids(batch) == {"p1", "p3"}
        assert batch.statistics["train/surplus_discarded"] == 0


async def test_an_exact_batch_draws_nothing_in_vain_and_waits() -> None:
    slow = SlowPrompt()
    client = ScriptedClient(before_sample=slow)
    async with running_app(config(on_policy_fill="exact"), client) as app:
        app.sources[""].strategy.estimate = TWO_THIRDS
        submit(app, [MIXED] * 4)
        await publish(app, client, 0)
        await settled(lambda: app.groups.num_kept == 1)
        assert {prompt_id for _, prompt_id, _ in client.calls} == {"p0", "p1"}
        slow.gate.set()
        assert ids(await train(app, client, 1)) == {"p0", "p1"}
        assert not client.cancelled
