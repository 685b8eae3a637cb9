"""The transfer of a version beside the next step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.trainer.loop.run_state import RunPhase
from services.trainer.loop.train_loop import TrainLoop
from sluice.errors import WeightSyncError
from tests.support.loop_world import World, run, until


@pytest.fixture
def world() -> World:
    """A run of three steps, and a replica."""
    world = World()
    world.register("a")
    return world


@asynccontextmanager
async def running(loop: TrainLoop) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(loop))
        yield


def _held(world: World, event: str) -> asyncio.Event:
    world.holds[event] = asyncio.Event()
    return world.holds[event]


def _place(world: World, event: str) -> int:
    return world.events.index(event)


async def test_the_next_batch_trains_while_a_version_is_sent(world: World) -> None:
    sent = _held(world, "publish 1")
    async with running(world.loop(overlaps=True)):
        await until(lambda: "train 2" in world.events)
        assert world.state.version == 0
        assert "announce 1 on a from 20" not in world.events
        sent.set()
    assert world.state.version == 3


async def test_a_batch_is_acknowledged_when_its_version_is_frozen_and_before_another_is_taken(
    world: World,
) -> None:
    await run(world.loop(overlaps=True))
    for step in (1, 2, 3):
        assert _place(world, f"freeze {step}") < _place(world, f"acknowledge {step}")
        assert _place(world, f"acknowledge {step}") < _place(world, f"publish {step}")
    for step in (1, 2):
        assert _place(world, f"acknowledge {step}") < _place(world, f"take {step + 1}")


async def test_a_version_is_announced_only_once_the_replicas_serve_it(world: World) -> None:
    sent = _held(world, "publish 1")
    async with running(world.loop(overlaps=True)):
        await until(lambda: "train 2" in world.events)
        world.register("b")
        # The announcement of a newcomer meanwhile is of the version that the others serve.
        await until(lambda: any(event.startswith("announce 0 on ab") for event in world.events))
        sent.set()
    versions = [int(event.split()[1]) for event in world.events if event.startswith("announce")]
    assert versions == sorted(versions)
    assert {1, 2, 3} <= set(versions)


async def test_a_version_is_frozen_only_once_the_one_before_is_served(world: World) -> None:
    sent = _held(world, "publish 1")
    async with running(world.loop(overlaps=True)):
        await until(lambda: "train 2" in world.events and world.state.phase is RunPhase.PUBLISHING)
        assert "freeze 2" not in world.events
        sent.set()
    announced = next(event for event in world.events if event.startswith("announce 1"))
    assert _place(world, announced) < _place(world, "freeze 2")


async def test_a_validation_begins_when_its_version_is_served_and_ends_before_the_next(
    world: World,
) -> None:
    sent, evaluated = _held(world, "publish 1"), _held(world, "evaluate 1")
    async with running(world.loop(overlaps=True, validates=True, test_freq=1)):
        await until(lambda: "train 2" in world.events)
        assert "evaluate 1" not in world.events
        sent.set()
        await until(lambda: world.state.phase is RunPhase.EVALUATING)
        assert "freeze 2" not in world.events
        evaluated.set()
    found = [event for event in world.events if event.startswith("evaluated")]
    assert found == [f"evaluated {step} under {step}" for step in (1, 2, 3)]


async def test_a_pause_begins_once_the_last_version_is_served(world: World) -> None:
    sent = _held(world, "publish 1")
    async with running(world.loop(overlaps=True)):
        await until(lambda: "publish 1" in world.events)
        world.state.pause()
        await until(lambda: world.state.phase is RunPhase.PUBLISHING)
        sent.set()
        await until(lambda: world.state.phase is RunPhase.PAUSED)
        assert world.state.version == world.state.step
        world.state.resume()


async def test_a_pause_that_ends_while_the_last_version_is_sent_holds_nothing(
    world: World,
) -> None:
    sent, taken = _held(world, "publish 1"), _held(world, "take 2")
    async with asyncio.timeout(60.0), running(world.loop(overlaps=True)):
        await until(lambda: "take 2" in world.events)
        world.state.pause()
        await until(lambda: world.state.phase is RunPhase.PUBLISHING)
        world.state.resume()
        taken.set()
        sent.set()
    assert world.state.version == 3


async def test_a_stop_while_a_paused_run_sends_its_last_version_ends_it(world: World) -> None:
    sent, _ = _held(world, "publish 1"), _held(world, "take 2")
    async with asyncio.timeout(60.0), running(world.loop(overlaps=True)):
        await until(lambda: "take 2" in world.events)
        world.state.pause()
        await until(lambda: world.state.phase is RunPhase.PUBLISHING)
        world.state.stop("enough")
        world.state.pause()
        sent.set()
    assert (world.state.version, world.state.step) == (1, 1)


async def test_a_checkpoint_on_request_during_a_transfer_holds_the_last_trained_step(
    world: World,
) -> None:
    sent, _ = _held(world, "publish 1"), _held(world, "take 2")
    async with running(world.loop(overlaps=True)):
        await until(lambda: "take 2" in world.events)
        async with asyncio.timeout(60.0):
            assert await world.state.request_save() == (1, "folder-1")
        assert world.state.version == 0
        sent.set()
        world.holds["take 2"].set()
    assert "save 1 at 10" in world.events


async def test_a_run_that_stops_during_a_transfer_ends_when_its_version_is_served(
    world: World,
) -> None:
    sent, _ = _held(world, "publish 1"), _held(world, "take 2")
    async with running(world.loop(overlaps=True, save_freq=5)):
        await until(lambda: "take 2" in world.events)
        world.state.stop("enough")
        await until(lambda: world.state.phase is RunPhase.PUBLISHING)
        sent.set()
    assert (world.state.version, world.state.step) == (1, 1)
    assert "save 1 at 10" in world.events


async def test_a_transfer_that_fails_ends_the_run_with_its_error(world: World) -> None:
    world.faults["publish 1"] = WeightSyncError("a", "publish", "none could take the weights")
    _held(world, "train 2")
    with pytest.raises(ExceptionGroup) as caught:
        await run(world.loop(overlaps=True))
    assert caught.group_contains(WeightSyncError, match="none could take the weights")


async def test_a_step_without_overlap_waits_for_its_transfer(world: World) -> None:
    sent = _held(world, "publish 1")
    async with running(world.loop(overlaps=False)):
        await until(lambda: "publish 1" in world.events)
        for _ in range(100):
            await asyncio.sleep(0)
        assert "acknowledge 1" not in world.events
        assert "take 2" not in world.events
        sent.set()
