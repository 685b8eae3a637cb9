"""When an idle engine begins: with all that come together, and without waiting for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.rollout.engines.causal_lm import CausalLM, CheckpointLayout
from services.rollout.engines.embedded import engine as torch_engine
from services.rollout.engines.embedded.engine import EmbeddedCore
from services.rollout.engines.thread import LoopThread
from services.rollout.engines.weight_inbox import WeightInbox
from sluice.device.cpu import CpuDevice

SLOTS = 8


class Loop:
    """What the core asks of a generation loop; a step ends all samples that are queued."""

    version, digest, generated_tokens = 1, "one", 0

    def __init__(self) -> None:
        self.slots, self.slots_busy, self.queued = SLOTS, 0, 0
        self.steps: list[int] = []  # samples queued at each step's begin
        self.stepped = asyncio.Event()
        self.home = asyncio.get_running_loop()
        self.is_over = False

    @property
    def has_work(self) -> bool:
        return self.queued + self.slots_busy > 0

    def submit(self, join: Callable[[], None]) -> None:
        join()

    def step(self) -> None:
        self.steps.append(self.queued)
        self.queued = self.slots_busy = 0
        self.home.call_soon_threadsafe(self.stepped.set)

    def abort_all(self) -> None: ...


Join = Callable[[Callable[[], None]], None]


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Loop, Join]]:
    loop, thread = Loop(), LoopThread("torch")
    model = CausalLM(cast("Any", None), CheckpointLayout(9, (), ()))
    core = EmbeddedCore(cast("Any", loop), model, WeightInbox(CpuDevice()))
    try:
        yield loop, lambda join: thread.begin(core.run(cast("Any", join)))
    finally:
        loop.is_over = True
        for _ in range(2):  # the last sample that comes has come
            await thread.call(core.check_alive(1.0), "ending a step")
        await thread.call(core.close(), "ending")
        await thread.stop()


def joining(loop: Loop, post: Join, others: int) -> Callable[[], None]:
    """A sample joins, and while it does so the next comes."""

    def join() -> None:
        loop.queued += 1
        if others and not loop.is_over:
            post(joining(loop, post, others - 1))

    return join


async def first_step(loop: Loop) -> int:
    async with asyncio.timeout(60):
        await loop.stepped.wait()
    return loop.steps[0]


@pytest.mark.parametrize(("others", "together"), [(4, 5), (100, SLOTS)], ids=["few", "too many"])
async def test_requests_that_come_one_after_another_begin_together_as_far_as_there_are_slots(
    monkeypatch: pytest.MonkeyPatch, others: int, together: int
) -> None:
    monkeypatch.setattr(torch_engine, "_MAX_GATHER_S", 20.0)
    async with running() as (loop, post):
        post(joining(loop, post, others))
        assert await first_step(loop) == together


async def test_an_engine_that_runs_takes_requests_between_its_steps() -> None:
    async with running() as (loop, post):

        def join_running() -> None:
            loop.slots_busy = 1
            joining(loop, post, others=4)()

        post(join_running)
        assert await first_step(loop) == 1


async def test_requests_that_never_end_do_not_keep_an_engine_from_beginning() -> None:
    async with running() as (loop, post):
        loop.slots = 10**9
        post(joining(loop, post, others=10**6))
        assert 1 < await first_step(loop) < 10**6
