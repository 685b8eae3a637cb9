"""Waits that last as long as something moves."""

from __future__ import annotations

import asyncio

import pytest

from sluice.concurrency.waits import while_progressing
from sluice.errors import DeadlineError, PeerError

STALL_S = 1.0
pytestmark = pytest.mark.usefixtures("waits_take_no_time")


class Work:
    """Ends after `polls` looks at its progress, which changes as long as it `moves`."""

    def __init__(self, polls: int, *, moves: bool = True) -> None:
        self.polls, self.moves, self.looks = polls, moves, 0
        self.was_cancelled = False
        self._ended = asyncio.Event()

    async def progress(self) -> str | None:
        self.looks += 1
        if self.looks >= self.polls:
            self._ended.set()
        return str(self.looks) if self.moves else None

    async def end(self) -> str:
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "done"


async def wait_for(work: Work, *, stall_s: float = STALL_S) -> str:
    return await while_progressing(
        work.end(), work.progress, stall_s=stall_s, interval_s=0.01, peer="fleet", phase="testing"
    )


async def test_work_that_moves_may_take_longer_than_any_standstill() -> None:
    assert await wait_for(Work(polls=150)) == "done"  # 1.5 s at least


async def test_work_that_stands_still_is_cancelled_with_an_error_that_names_it() -> None:
    work = Work(10**9, moves=False)
    with pytest.raises(DeadlineError, match=r"fleet: no answer within 0\.1 s .*; nothing"):
        await wait_for(work, stall_s=0.1)
    assert work.was_cancelled


async def test_an_error_of_the_work_comes_out_as_it_is() -> None:
    work = Work(10)

    async def fail() -> str:
        raise PeerError("fleet", "testing", "gone")

    with pytest.raises(PeerError, match="gone"):
        await while_progressing(
            fail(), work.progress, stall_s=STALL_S, interval_s=0.01, peer="f", phase="t"
        )


async def test_cancelling_the_wait_cancels_the_work() -> None:
    work = Work(10**9)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait_for(work))
        while not work.looks:
            await asyncio.sleep(0.01)
        waiting.cancel()
    assert work.was_cancelled
