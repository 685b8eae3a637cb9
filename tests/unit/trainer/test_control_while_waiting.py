"""Control calls while the run waits, refused batches, and what the accounts must add up to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.trainer.loop.run_state import RunPhase
from sluice.errors import PeerError, leaves
from sluice.types import TrainBatch
from tests.support.loop_world import WAIT_S, World, batch_of, run, until


@pytest.fixture
def world() -> World:
    """Return a world whose second batch does not arrive."""
    world = World()
    world.register("a")
    world.holds["take 2"] = asyncio.Event()
    return world


def takes(world: World) -> list[str]:
    return [event for event in world.events if event.startswith("take")]


async def test_a_stop_ends_a_run_that_waits_for_a_batch_with_its_checkpoint(world: World) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(save_freq=100)))
        await until(lambda: "take 2" in world.events)
        world.state.stop("enough")
    assert "train 2" not in world.events
    assert "save 1 at 10" in world.events
    assert world.state.phase is RunPhase.FINISHED


async def test_a_run_stopped_while_it_waits_validates_its_last_version(world: World) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(validates=True, test_freq=2)))
        await until(lambda: "take 2" in world.events)
        world.state.stop("enough")
    assert "evaluation 1" in world.recorded


async def test_a_checkpoint_is_saved_while_a_batch_is_awaited_which_is_then_trained(
    world: World,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "take 2" in world.events)
        async with asyncio.timeout(WAIT_S):
            assert await world.state.request_save() == (1, "folder-1")
        await until(lambda: world.state.phase is RunPhase.WAITING_FOR_BATCH)
        world.holds["take 2"].set()
    assert takes(world) == ["take 1", "take 2", "take 3"]
    assert "train 2" in world.events


async def test_a_batch_that_comes_during_a_save_is_trained(world: World) -> None:
    world.holds["save 1 at 10"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "take 2" in world.events)
        saving = tasks.create_task(world.state.request_save())
        await until(lambda: "save 1 at 10" in world.events)
        world.holds["take 2"].set()
        await asyncio.sleep(0)
        world.holds["save 1 at 10"].set()
    assert saving.result() == (1, "folder-1")
    assert takes(world) == ["take 1", "take 2", "take 3"]


async def test_a_pause_holds_a_run_that_waits_for_a_batch_and_the_batch_is_asked_for_again(
    world: World,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "take 2" in world.events)
        world.state.pause()
        await until(lambda: world.state.phase is RunPhase.PAUSED)
        world.holds["take 2"].set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert "train 2" not in world.events
        world.state.resume()
    assert takes(world) == ["take 1", "take 2", "take 2", "take 3"]
    assert [event for event in world.events if event.startswith("train")] == [
        *("train 1", "train 2", "train 3")
    ]


async def test_a_stop_ends_a_run_that_waits_for_replicas() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(overrides=["sluice.trainer.replica_wait_timeout_s=1000"])))
        await until(lambda: world.state.phase is RunPhase.WAITING_FOR_REPLICAS)
        world.state.stop("enough")
    assert not takes(world)
    assert world.recorded["accounts"]["prompts_lost"] == 0


async def test_a_pause_on_lease_ends_unless_it_is_renewed(
    world: World,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "take 2" in world.events)
        world.state.pause(lease_s=0.01)
        world.state.pause(lease_s=3600.0)
        await asyncio.sleep(0.05)
        assert world.state.is_paused
        world.holds["take 2"].set()
        world.state.pause(lease_s=0.01)
    assert "train 3" in world.events


async def test_a_pause_without_a_lease_outlasts_any_lease(world: World) -> None:
    world.state.pause(lease_s=0.01)
    world.state.pause()
    world.state.pause(lease_s=0.01)
    await asyncio.sleep(0.05)
    assert world.state.is_paused


async def test_a_refused_batch_ends_the_run_and_is_neither_trained_nor_acknowledged(
    world: World,
) -> None:
    def stale(step: int) -> TrainBatch:
        return replace(batch_of(step), groups=batch_of(step if step < 2 else 1).groups)

    world.batch_of = stale
    world.holds.clear()
    with pytest.raises(ExceptionGroup) as caught:
        await run(world.loop())
    (error,) = leaves(caught.value)
    assert isinstance(error, PeerError)
    assert "batch batch-2, group p, sample 0: tokens of version 0" in str(error)
    assert "train 2" not in world.events
    assert "acknowledge 2" not in world.events


async def test_groups_that_the_reward_service_does_not_know_as_trained_are_logged_as_lost(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.holds.clear()
    world.uncounted = {"batch-2"}
    await run(world.loop())
    accounts = world.recorded["accounts"]
    assert (accounts["groups_trained"], accounts["groups_acknowledged"]) == (3, 2)
    assert accounts["prompts_lost"] == 1
    assert "1 prompts are lost: 3 groups were trained" in caplog.text


async def test_a_run_whose_reward_service_is_gone_at_its_end_records_what_the_trainer_knows(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "take 2" in world.events)
        world.faults["accounts"] = PeerError("reward service", "asking for its status", "gone")
        world.holds["take 2"].set()
    accounts = world.recorded["accounts"]
    assert accounts["groups_trained"] == 3
    assert "trainer_s/training" in accounts
    assert "submitted" not in accounts
    assert "accounts.json holds only what the trainer knows: reward service" in caplog.text
    assert world.state.phase is RunPhase.FINISHED


async def test_a_run_with_complete_accounts_has_lost_no_prompt(world: World) -> None:
    world.holds.clear()
    await run(world.loop())
    accounts = world.recorded["accounts"]
    assert (accounts["groups_trained"], accounts["prompts_lost"]) == (3, 0)
