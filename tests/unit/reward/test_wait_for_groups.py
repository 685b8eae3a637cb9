"""The reward service reports in which part of the trainer's wait for a batch it was not full."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from services.reward.app import RewardApp
from services.reward.groups import batches
from sluice.config.loading.loader import load_config
from sluice.types import TrainBatch
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit

CONFIG = load_config(
    None,
    (
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
    ),
)
MIXED = "answer=1 right=2"


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(batches, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


async def asking(
    tasks: asyncio.TaskGroup, app: RewardApp, step: int, version: int = 0
) -> asyncio.Task[TrainBatch]:
    task = tasks.create_task(app.loop.batches.take(step, version, 60))
    await settled(lambda: app.loop.batches.num_asking > 0)
    return task


async def test_it_counts_from_the_question_until_the_batch_is_full(clock: Clock) -> None:
    async with running_app(CONFIG, ScriptedClient()) as app, asyncio.TaskGroup() as tasks:
        await app.loop.announce("trainer-1", 0, [replica("a", slots=8)], None)
        task = await asking(tasks, app, 1)
        clock.now = 107.0
        submit(app, [MIXED, MIXED])
        batch = await task
    assert batch.statistics["timing_s/wait_groups"] == 7.0


async def test_a_batch_that_was_full_before_the_question_has_no_wait(clock: Clock) -> None:
    async with running_app(CONFIG, ScriptedClient()) as app:
        await app.loop.announce("trainer-1", 0, [replica("a", slots=8)], None)
        submit(app, [MIXED, MIXED])
        await settled(lambda: app.groups.num_kept == 2)
        clock.now = 107.0
        batch = await app.loop.batches.take(1, 0, 60)
    assert batch.statistics["timing_s/wait_groups"] == 0.0


async def test_a_repeated_question_counts_from_the_first_and_another_steps_from_its_own(
    clock: Clock,
) -> None:
    client = ScriptedClient()
    async with running_app(CONFIG, client) as app, asyncio.TaskGroup() as tasks:
        await app.loop.announce("trainer-1", 0, [replica("a", slots=8)], None)
        lost = await asking(tasks, app, 1)
        lost.cancel()
        await asyncio.wait([lost])
        clock.now = 103.0
        again = await asking(tasks, app, 1)
        clock.now = 110.0
        submit(app, [MIXED, MIXED])
        first = await again
        app.loop.batches.acknowledge(first.batch_id, 1)
        client.versions["a"] = 1
        await app.loop.announce("trainer-1", 1, [replica("a", 1, slots=8)], None)
        clock.now = 120.0
        task = await asking(tasks, app, 2, 1)
        clock.now = 124.0
        submit(app, [MIXED, MIXED], 2)
        second = await task
    assert first.statistics["timing_s/wait_groups"] == 10.0
    assert second.statistics["timing_s/wait_groups"] == 4.0
