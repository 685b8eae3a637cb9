"""Replicas that keep a version until its validation ends, while the others get the next ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.loop.run_state import RunPhase
from sluice.algorithm.accounting import ReplicaCounters
from sluice.algorithm.publishing import num_held_for_validation
from sluice.algorithm.routing import ReplicaUse
from sluice.types import ReplicaInfo
from tests.support.loop_world import World, run, until
from tests.support.publisher_fleet import TIMEOUT_S, Trainer

HELD = partial(num_held_for_validation, max_staleness=1)
STALL_S = 20.0


def _info(name: str) -> ReplicaInfo:
    return ReplicaInfo(name, f"{name}-1", f"{name}:1", 8)


@pytest.fixture
def fleet() -> Fleet:
    """Four replicas that serve version 3, one of them held at it."""
    fleet = Fleet("layout", 60.0, STALL_S)
    for name in "abcd":
        fleet.register(_info(name), "layout", 0.0)
        fleet.mark_serving(_info(name), 3)
    assert fleet.hold(3, HELD) == (_info("a"),)
    return fleet


def _uses(fleet: Fleet) -> dict[str, tuple[int, ReplicaUse]]:
    return {one.info.name: (one.policy_version, one.use) for one in fleet.announced_replicas()}


def _state(fleet: Fleet, name: str) -> MemberState:
    return next(member.state for member in fleet.members() if member.info.name == name)


def test_each_replica_is_announced_with_its_own_version_and_use(fleet: Fleet) -> None:
    leaving = (3, ReplicaUse.TRAINING)
    held = {"a": (3, ReplicaUse.VALIDATION)}
    assert _uses(fleet) == {**held, "b": leaving, "c": leaving, "d": leaving}
    for name in "bcd":
        fleet.mark_serving(_info(name), 4)
    assert _uses(fleet) == {**held, **dict.fromkeys("bcd", (4, ReplicaUse.ANY))}


def test_a_released_replica_needs_the_newest_weights_like_a_newcomer(fleet: Fleet) -> None:
    fleet.changed.clear()
    fleet.release()
    assert fleet.changed.is_set()
    assert fleet.in_state(MemberState.PENDING) == (_info("a"),)
    assert _uses(fleet) == dict.fromkeys("bcd", (3, ReplicaUse.ANY))


def test_a_replica_that_leaves_the_version_takes_no_validation_although_no_held_one_is_left(
    fleet: Fleet,
) -> None:
    fleet.expel(_info("a"), "a test")
    assert fleet.held_version == 3
    assert _uses(fleet) == dict.fromkeys("bcd", (3, ReplicaUse.TRAINING))


def test_only_replicas_that_serve_the_version_are_held() -> None:
    fleet = Fleet("layout", 60.0)
    for name, version in (("a", 2), ("b", 3), ("c", 3)):
        fleet.register(_info(name), "layout", 0.0)
        fleet.mark_serving(_info(name), version)
    assert fleet.hold(3, HELD) == (_info("b"),)


def test_a_held_replica_without_work_is_not_stalled_and_one_that_hangs_is(fleet: Fleet) -> None:
    def beat(now_s: float, busy: int) -> None:
        load = ReplicaCounters(slots_busy=busy, generated_tokens=5)
        fleet.heartbeat("a", "a-1", load, draining=False, now_s=now_s, turns=1)

    for second in range(100):
        beat(float(second), busy=0)
    assert _state(fleet, "a") is MemberState.HELD
    for second in range(100, 130):
        beat(float(second), busy=1)
    assert _state(fleet, "a") is MemberState.STALLED


@asynccontextmanager
async def _running(world: World, **settings: Any) -> AsyncIterator[None]:
    loop = world.loop(validates=True, **{"staleness": 1, **settings})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(loop))
        yield


def _world(names: str, steps: int = 3) -> World:
    world = World(steps)
    for name in names:
        world.register(name)
    return world


def _held(world: World, event: str) -> asyncio.Event:
    world.holds[event] = asyncio.Event()
    return world.holds[event]


@pytest.mark.parametrize(("staleness", "overlaps"), [(1, False), (2, True)])
async def test_versions_are_published_while_a_validation_runs(
    staleness: int, overlaps: bool
) -> None:
    world = _world("ab")
    ended, trained = _held(world, "evaluate 0"), _held(world, "train 3")
    async with _running(world, staleness=staleness, overlaps=overlaps, val_before_train=True):
        await until(lambda: any(one.startswith("announce 2") for one in world.events))
        assert "evaluated 0 under 2" not in world.events
        assert {m.info.name: m.version for m in world.fleet.members()} == {"a": 0, "b": 2}
        ended.set()
        await until(lambda: "announce 2 on ab from 30" in world.events)
        trained.set()
    assert any(one.startswith("announce 1 on [a]b") for one in world.events)
    assert "seed a" in world.events
    assert "evaluation 0" in world.recorded


async def test_the_others_swap_only_when_the_reward_service_knows_what_is_held() -> None:
    world = _world("ab", steps=1)
    ended, known = _held(world, "evaluate 0"), _held(world, "announce 0 on [a]b from 10")
    async with _running(world, val_before_train=True):
        await until(lambda: "announce 0 on [a]b from 10" in world.events)
        for _ in range(100):
            await asyncio.sleep(0)
        assert "freeze 1" not in world.events
        known.set()
        await until(lambda: "publish 1" in world.events)
        ended.set()


@pytest.mark.parametrize(("names", "staleness"), [("a", 1), ("ab", 0)])
async def test_a_fleet_that_cannot_be_divided_validates_before_the_next_publish(
    names: str, staleness: int
) -> None:
    world = _world(names)
    ended = _held(world, "evaluate 0")
    async with _running(world, staleness=staleness, val_before_train=True):
        await until(lambda: world.state.phase is RunPhase.EVALUATING)
        assert "freeze 1" not in world.events
        ended.set()
    assert "evaluated 0 under 0" in world.events
    assert not [one for one in world.events if "[" in one]


async def test_the_next_validation_waits_for_the_one_that_runs() -> None:
    world = _world("ab")
    ended = _held(world, "evaluate 0")
    async with _running(world, val_before_train=True, test_freq=2):
        await until(lambda: "step 2" in world.recorded and world.state.phase is RunPhase.EVALUATING)
        assert "evaluate 2" not in world.events
        ended.set()
    assert "evaluation 2" in world.recorded


async def test_a_stop_without_validation_releases_the_held_replicas() -> None:
    world = _world("ab", steps=100)
    _held(world, "evaluate 0")
    async with _running(world, val_before_train=True):
        await until(lambda: "publish 1" in world.events)
        world.state.stop("enough")
        world.state.no_validation.set()
    assert world.fleet.held_version is None
    assert "evaluation 0" not in world.recorded


async def test_a_held_replica_gets_no_weights_until_its_release() -> None:
    trainer = Trainer(TIMEOUT_S)
    replicas = {name: trainer.add(name) for name in "ab"}
    try:
        await trainer.publish(0)
        trainer.fleet.hold(0, HELD)
        for version in (1, 2):
            report = await trainer.publish(version)
            assert (report.replicas, report.attempts) == (1, 1)
        assert trainer.serving() == {"b": 2}
        assert replicas["a"].calls.count("commit") == 1
        trainer.fleet.release()
        await trainer.publisher.seed_newcomers()
        assert trainer.serving() == {"a": 2, "b": 2}
        report = await trainer.publish(3)
        assert (report.replicas, report.attempts) == (2, 1)
    finally:
        await trainer.publisher.close()
        for replica in replicas.values():
            replica.end()
