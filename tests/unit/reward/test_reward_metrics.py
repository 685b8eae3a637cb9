"""What the reward service exports is what its status reports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from services.reward.app import RewardApp
from services.reward.telemetry import (
    BatchHistory,
    DemandMeter,
    RewardMetrics,
    fleet_status,
)
from sluice.algorithm.routing import ReplicaUse
from sluice.config.loading.loader import load_config
from sluice.telemetry.metric_names import instruments
from sluice.telemetry.metrics import Distribution, InstrumentReading
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit

CONFIG = load_config(
    None,
    (
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "sluice.asynchrony.max_staleness=1",
    ),
)


MIXED, RIGHT = "answer=1 right=2", "answer=1 right=4"


def metrics_of(app: RewardApp) -> RewardMetrics:
    history = BatchHistory(1)
    app.counters.on_batch = history.note_batch
    demand = DemandMeter(lambda: fleet_status(app, history.num_formed))
    return RewardMetrics(app, history, demand, 2)


def reported(readings: RewardMetrics) -> Mapping[tuple[str, ...], InstrumentReading]:
    return {(one.instrument.name, *one.labels): one for one in readings.readings()}


async def test_counts_of_a_batch_are_those_of_the_status() -> None:
    async with running_app(CONFIG, ScriptedClient()) as app:
        metrics = metrics_of(app)
        submit(app, [MIXED, MIXED, RIGHT])
        await app.loop.announce("trainer-1", 0, [replica("a", slots=8)], None)
        metrics.demand.measure(0.0)
        await settled(lambda: app.groups.num_kept == 2)
        batch = await app.loop.batches.take(1, 0, 60)
        app.loop.batches.acknowledge(batch.batch_id, 1)
        metrics.demand.measure(1.0)
        found, status = reported(metrics), app.statistics()
        accounts = app.ledger
    values = {key: one.value for key, one in found.items()}
    assert values[("sluice_reward_prompts_submitted_total",)] == accounts.num_submitted == 3
    assert values[("sluice_reward_prompts_ended_total", "trained")] == 2.0
    assert values[("sluice_reward_prompts_ended_total", "filtered_all_right")] == 1.0
    assert values[("sluice_reward_groups_kept_total",)] == status["reward/groups_kept"] == 2.0
    assert values[("sluice_reward_samples_total", "scored")] == 12.0
    assert values[("sluice_reward_received_tokens_total",)] == status["reward/tokens/received"]
    assert values[("sluice_reward_batches_total",)] == 1.0
    assert values[("sluice_rollout_demand_replicas",)] == 1.0
    assert {one.instrument for one in found.values()} <= set(instruments()["reward"])


async def test_staleness_and_time_to_fill_are_reported_of_every_batch() -> None:
    async with running_app(CONFIG, ScriptedClient()) as app:
        metrics = metrics_of(app)
        submit(app, [MIXED, MIXED])
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        await settled(lambda: app.groups.num_kept == 2)
        await app.loop.announce("trainer-1", 1, [replica("a", 1)], None)
        await app.loop.batches.take(2, 1, 60)
        found = reported(metrics)
    staleness = found[("sluice_reward_staleness_versions",)].value
    fills = found[("sluice_reward_batch_fill_seconds",)].value
    assert isinstance(staleness, Distribution)
    assert isinstance(fills, Distribution)
    assert staleness.cumulative[:2] == ((0.0, 0), (1.0, 8))
    assert fills.cumulative[-1][1] == 1
    assert found[("sluice_reward_responses_at_bound_total",)].value == 8.0


@pytest.mark.parametrize(("max_staleness", "count"), [(0, 0), (1, 2), (2, 1), (3, 0)])
def test_responses_at_the_bound_are_counted_where_there_is_one(
    max_staleness: int, count: int
) -> None:
    rollouts = [SimpleNamespace(oldest_version=version) for version in (5, 6, 7, None)]
    group: Any = SimpleNamespace(rollouts=rollouts)
    history = BatchHistory(max_staleness)
    history.note_batch([group], 7, 1.0)
    assert history.num_at_bound == count


async def test_demand_counts_no_replica_that_is_held_for_a_validation() -> None:
    async with running_app(CONFIG, ScriptedClient()) as app:
        held = replica("a", 0, slots=4, use=ReplicaUse.VALIDATION)
        await app.loop.announce("trainer-1", 1, [held, replica("b", 1, slots=6)], None)
        facts = fleet_status(app, 0)
        assert (facts.num_replicas, facts.num_slots) == (1, 6)


async def test_waits_for_generation_starve_the_trainer_and_those_for_prompts_do_not() -> None:
    opened = asyncio.Event()

    async def wait(*_: object) -> None:
        await opened.wait()

    async with running_app(CONFIG, ScriptedClient(before_sample=wait)) as app:
        await app.loop.announce("trainer-1", 0, [replica("a", slots=6)], None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(app.loop.batches.take(1, 0, 60))
            await settled(lambda: app.loop.batches.num_asking > 0)
            facts = fleet_status(app, 0)
            assert (facts.num_replicas, facts.num_slots, facts.slots_in_use) == (1, 6, 0)
            assert not facts.is_starved
            submit(app, [MIXED, MIXED])
            await settled(lambda: fleet_status(app, 0).slots_in_use > 0)
            assert fleet_status(app, 0).is_starved
            # A replica holds more sequences than slots, which count once.
            assert fleet_status(app, 0).slots_in_use <= 6
            opened.set()
        assert not fleet_status(app, 1).is_starved
