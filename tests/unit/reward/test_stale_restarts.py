"""Groups without a place in time start again: no kept group is lost to the staleness bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from services.reward.app import RewardApp
from services.reward.generation.request import GenerateEvent, GroupRequest
from services.reward.group_table import GroupState
from sluice.algorithm.sampling.admission import YieldEstimate
from sluice.config.run import RunConfig
from sluice.errors import DeadlineError
from sluice.types import ReplicaInfo, Rollout, TrainBatch
from tests.support.reward_app import (
    ScriptedClient,
    publish,
    replica,
    running_app,
    settled,
    submit,
    train,
    turns,
)

MIXED = "answer=1 right=1"
WRONG = "answer=1 right=0"
TOKENS_PER_SAMPLE = 8
RECKLESS = YieldEstimate(prior_yield=0.05, prior_weight=1e6)
"""A yield so low that admission starts more groups than have a place, and all are kept."""


def config(**asynchrony: Any) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True}},
        "sluice": {"asynchrony": {"max_staleness": 1, **asynchrony}},
    }
    return msgspec.convert(tree, RunConfig)


class Gates:
    """Holds samples back by (prompt id, sample index) until they are let go."""

    def __init__(self, *held: tuple[str, int]) -> None:
        self._gates = {place: asyncio.Event() for place in held}

    async def __call__(self, _name: str, request: GroupRequest, index: int) -> None:
        if (gate := self._gates.get((request.prompt.prompt_id, index))) is not None:
            await gate.wait()

    def open(self, *prompt_ids: str) -> None:
        for (prompt_id, _), gate in self._gates.items():
            if prompt_id in prompt_ids:
                gate.set()


def ids(batch: TrainBatch) -> list[str]:
    return [group.prompt_id for group in batch.groups]


def ended(app: RewardApp) -> dict[str, int]:
    return {end.value: count for end, count in app.ledger.by_end.items() if count}


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
async def test_no_kept_group_is_lost_to_the_bound_when_more_run_than_have_a_place(
    on_stale: str,
) -> None:
    gates = Gates(("p3", 1), ("p4", 1), ("p5", 1))
    client = ScriptedClient(before_sample=gates)
    async with running_app(config(on_stale=on_stale), client) as app:
        app.sources[""].strategy.estimate = RECKLESS
        submit(app, [MIXED] * 6)
        await publish(app, client, 0)
        await settled(lambda: len(client.calls) == 6)
        gates.open("p3")
        await settled(lambda: app.groups.num_kept == 4)  # all places of version 0 are taken
        gates.open("p4", "p5")
        await turns(50)  # they would be kept meanwhile
        batches = [await train(app, client, step) for step in (1, 2, 3)]
        assert [ids(batch) for batch in batches] == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
        assert sorted(client.cancelled) == ["p4", "p5"]
        assert ended(app) == {"trained": 6}
        assert sum(batch.statistics["train/surplus_discarded"] for batch in batches) == 0
        assert batches[2].statistics["train/staleness_max"] <= 1


async def test_places_that_the_leased_batch_has_taken_count_no_more() -> None:
    gates = Gates(("p2", 1), ("p3", 1), ("p4", 1))
    client = ScriptedClient(before_sample=gates)
    async with running_app(config(), client) as app:
        app.sources[""].strategy.estimate = RECKLESS
        submit(app, [MIXED] * 5)
        await publish(app, client, 0)
        leased = await app.loop.batches.take(1, 0, 60)
        gates.open("p2", "p3")
        await settled(lambda: "p4" in client.cancelled)
        gates.open("p4")
        app.loop.batches.acknowledge(leased.batch_id, 1)
        await publish(app, client, 1)
        assert ids(await train(app, client, 2)) == ["p2", "p3"]
        await settled(lambda: app.groups.num_kept == 1)
        assert app.groups["p4"].state is GroupState.KEPT
        assert ended(app) == {"trained": 4}


class LateStart(ScriptedClient):
    """Replicas that begin the groups of some prompts only when they are let go."""

    def __init__(self, *held: str) -> None:
        super().__init__()
        self.held, self.gate = held, asyncio.Event()

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout] = (),
    ) -> AsyncGenerator[GenerateEvent, None]:
        if request.prompt.prompt_id in self.held:
            await self.gate.wait()
        async with aclosing(super().generate(replica, request, sample_indexes)) as events:
            async for event in events:
                yield event


async def test_a_group_that_starts_after_its_place_was_taken_starts_again() -> None:
    client = LateStart("p4")
    async with running_app(config(), client) as app:
        app.sources[""].strategy.estimate = RECKLESS
        submit(app, [MIXED] * 5)
        await publish(app, client, 0)
        await settled(lambda: app.groups.num_kept == 4)
        client.gate.set()
        await settled(lambda: app.groups["p4"].state is GroupState.WAITING)
        for step in (1, 2):
            await train(app, client, step)
        await settled(lambda: app.groups.num_kept == 1)
        assert ended(app) == {"trained": 4}


async def test_tokens_generated_in_vain_are_booked_as_stale() -> None:
    gates = Gates(("p3", 1), ("p4", 1), ("p5", 0))
    client = ScriptedClient(before_sample=gates)
    async with running_app(config(), client) as app:
        app.sources[""].strategy.estimate = RECKLESS
        submit(app, [MIXED] * 6)
        await publish(app, client, 0)
        await settled(lambda: len(client.calls) == 6)
        gates.open("p3")
        await settled(lambda: app.groups.counts[GroupState.WAITING] == 2)
        gates.open("p4", "p5")
        batches = [await train(app, client, step) for step in (1, 2, 3)]
    totals = {
        name: sum(batch.statistics[f"train/{name}"] for batch in batches)
        for name in (
            "discarded_tokens/stale",
            "discarded_tokens/taken_over",
            "groups_restarted",
            "trained_tokens",
            "generated_tokens",
        )
    }
    assert totals == {
        "discarded_tokens/stale": TOKENS_PER_SAMPLE,  # p4's first sample
        "discarded_tokens/taken_over": 0,
        "groups_restarted": 2,
        "trained_tokens": 12 * TOKENS_PER_SAMPLE,
        "generated_tokens": 13 * TOKENS_PER_SAMPLE,
    }
    assert app.counters.totals()["reward/discarded_tokens/stale"] == TOKENS_PER_SAMPLE


async def test_a_batch_waits_for_as_many_running_groups_as_are_likely_to_be_kept() -> None:
    gates = Gates(("p0", 0), ("p1", 0), ("p2", 0))
    client = ScriptedClient(before_sample=gates)
    async with running_app(config(max_staleness=2), client) as app:
        submit(app, [MIXED] * 3)
        await publish(app, client, 1)
        await settled(lambda: len(client.calls) == 3)
        await publish(app, client, 2)
        submit(app, [MIXED] * 2, first=3)
        await settled(lambda: app.groups.num_kept == 2)
        with pytest.raises(DeadlineError):  # were all three kept, one would find no place
            await app.loop.batches.take(3, 2, 0.05)
        app.sources[""].strategy.estimate = RECKLESS
        assert ids(await app.loop.batches.take(3, 2, 60)) == ["p3", "p4"]


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_the_order_of_events_every_kept_group_is_trained_in_time(seed: int) -> None:
    rng = random.Random(seed)
    max_staleness = 1 + seed % 3

    async def jitter(_name: str, _request: GroupRequest, _index: int) -> None:
        await turns(rng.choice((0, 1, 5, 40, 200)))

    client = ScriptedClient(before_sample=jitter)
    async with running_app(config(max_staleness=max_staleness), client) as app:
        submit(app, [MIXED if rng.random() < 0.7 else WRONG for _ in range(60)])
        await publish(app, client, 0)
        steps = 0
        while app.ledger.num_pending >= 2 * (max_staleness + 2):
            app.sources[""].strategy.estimate = RECKLESS
            batch = await app.loop.batches.take(steps + 1, steps, 60)
            await turns(rng.randrange(60))
            app.loop.batches.acknowledge(batch.batch_id, steps + 1)
            steps += 1
            await publish(app, client, steps)
            assert batch.statistics["train/staleness_max"] <= max_staleness
            assert app.statistics()["reward/prompts_lost"] == 0
        assert "dropped_stale" not in ended(app)
        assert app.statistics()["reward/groups_acknowledged"] == ended(app)["trained"]
        assert app.counters.totals()["reward/groups_restarted"] > 0


async def test_a_group_that_is_cancelled_after_its_last_pause_starts_again_and_is_not_judged() -> (
    None
):
    """A replica that reports version 0 when 1 is announced: its groups start too old."""
    client = ScriptedClient()
    strict = config(max_staleness=0)
    async with running_app(strict, client) as app:
        submit(app, [MIXED, MIXED])
        await app.loop.announce("trainer", 1, [replica("a", 1)], None)
        await settled(lambda: len(client.calls) >= 6)
        assert app.loop.batches.error is None
        assert not app.groups.num_kept
        client.versions["a"] = 1
        batch = await app.loop.batches.take(1, 1, 60)
    assert {group.prompt_id for group in batch.groups} == {"p0", "p1"}
    assert app.statistics()["reward/groups_kept"] == 2.0
