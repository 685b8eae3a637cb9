"""When an idle engine begins: with all that come together, and without waiting for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from services.rollout.engines.embedded import thread as engine_thread
from services.rollout.engines.embedded.loop import GenerationLoop
from services.rollout.engines.embedded.thread import EngineThread

SLOTS = 8


class Loop:
    """What the thread asks of a generation loop; a step ends all samples that are queued."""

    def __init__(self) -> None:
        self.slots, self.slots_busy, self.queued = SLOTS, 0, 0
        self.steps: list[int] = []  # samples queued at each step's begin
        self.stepped = asyncio.Event()
        self.home = asyncio.get_running_loop()

    @property
    def has_work(self) -> bool:
        return self.queued + self.slots_busy > 0

    def step(self) -> None:
        self.steps.append(self.queued)
        self.queued = self.slots_busy = 0
        self.home.call_soon_threadsafe(self.stepped.set)

    def rest(self) -> None: ...

    def abort_all(self) -> None: ...

    def take_deliveries(self) -> list[object]:
        return []


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Loop, EngineThread]]:
    loop = Loop()
    thread = EngineThread(
        lambda: cast("GenerationLoop", loop), deliver=lambda _: None, fail=lambda _: None
    )
    await thread.start()
    try:
        yield loop, thread
    finally:
        await thread.stop()


def joining(thread: EngineThread, others: int) -> Callable[[Loop], None]:
    """A sample joins, and while it does so the next comes."""

    def join(loop: Loop) -> None:
        loop.queued += 1
        if others:
            post(thread, joining(thread, others - 1))

    return join


def post(thread: EngineThread, command: Callable[[Loop], None]) -> None:
    thread.post(cast("Callable[[GenerationLoop], None]", command))


async def first_step(loop: Loop) -> int:
    async with asyncio.timeout(20):
        await loop.stepped.wait()
    return loop.steps[0]


@pytest.mark.parametrize(("others", "together"), [(4, 5), (100, SLOTS)], ids=["few", "too many"])
async def test_requests_that_come_one_after_another_begin_together_as_far_as_there_are_slots(
    monkeypatch: pytest.MonkeyPatch, others: int, together: int
) -> None:
    monkeypatch.setattr(engine_thread, "_GATHER_MOST_S", 20.0)
    async with running() as (loop, thread):
        post(thread, joining(thread, others))
        assert await first_step(loop) == together


async def test_an_engine_that_runs_takes_requests_between_its_steps() -> None:
    async with running() as (loop, thread):

        def join_running(loop: Loop) -> None:
            loop.slots_busy = 1
            joining(thread, others=4)(loop)

        post(thread, join_running)
        assert await first_step(loop) == 1


async def test_requests_that_never_end_do_not_keep_an_engine_from_beginning() -> None:
    async with running() as (loop, thread):
        loop.slots = 10**9
        post(thread, joining(thread, others=10**6))
        assert 1 < await first_step(loop) < 10**6
        loop.slots = SLOTS
