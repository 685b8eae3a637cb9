"""One prompt's images are decoded at a time, whoever comes and goes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.rollout.engines.request_rules import ImageTurn


class Decoder:
    """Ends when it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(10)
        return "patches"

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.has_begun.wait, 10)


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_caller_that_went_away_gives_up_its_turn_when_its_thread_has_ended() -> None:
    turn, first, second = ImageTurn(), Decoder(), Decoder()
    second.may_end.set()
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(turn.read(2, first))
        await first.begun()
        waiting = tasks.create_task(turn.read(3, second))
        await _settle()
        assert turn.samples == 5
        gone.cancel()
        await _settle()
        assert gone.cancelled()
        assert turn.samples == 3
        assert not second.has_begun.is_set()
        first.may_end.set()
        assert await waiting == "patches"
    assert turn.samples == 0


async def test_a_caller_that_goes_while_it_waits_takes_no_turn() -> None:
    turn, first, second, third = ImageTurn(), Decoder(), Decoder(), Decoder()
    third.may_end.set()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(turn.read(1, first))
        await first.begun()
        gone = tasks.create_task(turn.read(1, second))
        await _settle()
        gone.cancel()
        first.may_end.set()
        await running
        assert await turn.read(1, third) == "patches"
    assert not second.has_begun.is_set()


async def test_a_failure_is_the_callers_and_the_next_has_its_turn() -> None:
    turn, decoder = ImageTurn(), Decoder()
    decoder.may_end.set()
    with pytest.raises(ZeroDivisionError):
        await turn.read(1, lambda: 1 // 0)
    assert await turn.read(1, decoder) == "patches"
