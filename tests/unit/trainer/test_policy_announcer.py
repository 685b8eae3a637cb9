"""Announcements: once for each change, in order, each with the data cursor of its version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from services.trainer.fleet.members import Fleet
from services.trainer.loop.reward_client import PolicyAnnouncer
from services.trainer.loop.run_state import RunState
from sluice.algorithm.routing import AnnouncedReplica
from sluice.errors import PeerError
from sluice.types import DataProgress, ReplicaInfo

Sent = tuple[int, tuple[str, ...], DataProgress | None]


class Desk:
    """A fleet, a state, and what was announced of them."""

    def __init__(self, progress: DataProgress | None = None) -> None:
        self.progress = progress
        self.sent: list[Sent] = []
        self.restored: list[int | None] = []
        self.fault: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.fleet, self.state = Fleet("layout", 1e9), RunState("t", 10, 0)
        self.announcer = PolicyAnnouncer(self, self.fleet, self.state, lambda: self.progress)

    async def announce(
        self,
        version: int,
        replicas: Sequence[AnnouncedReplica],
        progress: Callable[[], DataProgress | None],
        rolled_back_to: int | None,
        /,
    ) -> None:
        if self.fault is not None:
            raise self.fault
        self.sent.append((version, tuple(one.info.name for one in replicas), progress()))
        self.restored.append(rolled_back_to)
        if self.hold is not None:
            await self.hold.wait()

    def serve(self, name: str, version: int) -> None:
        info = ReplicaInfo(name, f"{name}-1", f"{name}:1", 8)
        self.fleet.register(info, "layout", 0.0)
        self.fleet.mark_serving(info, version)


async def test_nothing_is_announced_before_a_first_version() -> None:
    desk = Desk()
    await desk.announcer.announce()
    assert desk.sent == []


async def test_only_a_change_of_version_or_of_serving_replicas_is_announced() -> None:
    desk = Desk()
    desk.state.version = 0
    desk.serve("a", 0)
    for _ in range(2):
        await desk.announcer.announce()
    desk.state.version = 1
    for _ in range(2):
        await desk.announcer.announce()
    desk.serve("b", 1)
    for _ in range(2):
        await desk.announcer.announce()
    assert desk.sent == [(0, ("a",), None), (1, ("a",), None), (1, ("a", "b"), None)]


async def test_a_failed_announcement_is_made_again_with_the_cursor() -> None:
    desk = Desk(DataProgress(7))
    desk.state.version, desk.fault = 0, PeerError("reward", "announcing", "gone")
    with pytest.raises(PeerError):
        await desk.announcer.announce()
    desk.fault = None
    await desk.announcer.announce()
    assert desk.sent == [(0, (), DataProgress(7))]


async def test_every_announcement_tells_where_the_data_set_stands_at_that_version() -> None:
    desk = Desk()
    desk.state.version = 0
    await desk.announcer.announce()
    desk.state.version = 1

    async def acknowledge() -> None:
        desk.progress = DataProgress(4)

    await desk.announcer.announce(preparation=acknowledge)
    desk.serve("a", 1)
    await desk.announcer.announce()
    assert [progress for _, _, progress in desk.sent] == [None, DataProgress(4), DataProgress(4)]


async def test_an_announcement_that_had_to_wait_tells_the_newest_version() -> None:
    desk = Desk()
    desk.state.version, desk.hold = 0, asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(desk.announcer.announce())
        await asyncio.sleep(0)
        tasks.create_task(desk.announcer.announce())
        await asyncio.sleep(0)
        desk.state.version = 1
        desk.hold.set()
    assert [version for version, _, _ in desk.sent] == [0, 1]


async def test_later_announcements_of_a_rollback_repeat_it_and_those_of_others_do_not() -> None:
    desk = Desk()
    desk.state.version = 4
    await desk.announcer.announce(rolled_back_to=2)
    desk.serve("a", 4)
    await desk.announcer.announce()
    desk.state.version = 5
    await desk.announcer.announce()
    assert desk.restored == [2, 2, None]


async def test_what_comes_first_comes_before_any_other_announcement() -> None:
    desk = Desk()
    desk.state.version = 1
    acknowledged = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(desk.announcer.announce(preparation=lambda: wait(acknowledged)))
        await asyncio.sleep(0)
        tasks.create_task(desk.announcer.announce())
        for _ in range(5):
            await asyncio.sleep(0)
        assert desk.sent == []
        acknowledged.set()
    assert desk.sent == [(1, (), None)]


async def wait(event: asyncio.Event) -> None:
    await event.wait()
