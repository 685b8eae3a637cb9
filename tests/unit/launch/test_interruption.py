"""Work that is cancelled once it is unwanted."""

from __future__ import annotations

import asyncio

import pytest

from sluice.concurrency.waits import run_unless


async def test_the_result_of_work_that_ends_first_is_returned() -> None:
    async def work() -> int:
        return 7

    assert await run_unless(asyncio.Event(), work()) == 7


async def test_work_is_cancelled_once_it_is_not_wanted() -> None:
    unwanted, begun = asyncio.Event(), asyncio.Event()
    was_cancelled: list[bool] = []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled.append(True)
            raise

    async with asyncio.TaskGroup() as tasks:
        doing = tasks.create_task(run_unless(unwanted, work()))
        await begun.wait()
        unwanted.set()
    assert doing.result() is None
    assert was_cancelled == [True]


async def test_an_error_comes_out_as_itself() -> None:
    async def work() -> None:
        raise ValueError("as it was")

    with pytest.raises(ValueError, match=r"^as it was$"):
        await run_unless(asyncio.Event(), work())


async def test_cancelling_the_wait_cancels_the_work() -> None:
    begun = asyncio.Event()
    ended: list[str] = []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async with asyncio.TaskGroup() as tasks:
        doing = tasks.create_task(run_unless(asyncio.Event(), work()))
        await begun.wait()
        doing.cancel()
    assert doing.cancelled()
    assert ended == ["work"]
