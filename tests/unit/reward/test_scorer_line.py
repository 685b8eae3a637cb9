"""Who gets a scorer process next, and what travels along."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from services.reward.scorer_line import SHARED_CHARS, Answers, ScorerLine, ScoringPace
from services.reward.scorer_messages import ScoreItem, ScorerNumber

Turn = str | Answers | None


def items(count: int, chars: int = 1) -> list[ScoreItem]:
    return [ScoreItem("mine", "x" * chars, "")] * count


class Line(ScorerLine[str]):
    """A line whose waits are started one after the other."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        super().__init__()
        self._tasks = tasks

    async def waits(
        self, asked: Sequence[ScoreItem], *, is_alone: bool = False
    ) -> asyncio.Task[Turn]:
        task = self._tasks.create_task(self.turn(asked, is_alone=is_alone))
        await asyncio.sleep(0)
        return task


async def test_seats_go_to_those_who_wait_in_turn_and_the_last_one_used_first() -> None:
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        first, second = await line.waits(items(1)), await line.waits(items(1))
        line.put("a")
        line.put("b")
        assert [await first, await second] == ["a", "b"]
        line.put("a")
        line.put("b")
        assert await line.turn(items(1), is_alone=False) == "b"
        assert line.is_idle("a")
        assert not line.is_idle("b")


async def test_whoever_has_a_process_takes_along_the_next_in_line_as_far_as_there_is_room() -> None:
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        waits = [await line.waits(items(8)) for _ in range(3)]
        taken = line.companions(20)
        assert [len(each.items) for each in taken] == [8, 8]
        answers = (ScorerNumber(1.0, {}),) * 8
        taken[0].settle(answers)
        taken[1].settle(None)
        taken[1].settle(answers)
        line.put("seat")
        assert [await wait for wait in waits] == [answers, None, "seat"]


@pytest.mark.parametrize("room", [0, 7])
async def test_nothing_is_taken_along_without_room_for_the_next_in_line(room: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        await line.waits(items(8))
        await line.waits(items(1))
        assert line.companions(room) == ()
        line.put("a")
        line.put("b")


async def test_neither_who_has_to_be_alone_nor_what_is_too_long_is_taken_along() -> None:
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        await line.waits(items(1), is_alone=True)
        assert line.companions(100) == ()
        line.put("a")
        long, short = await line.waits(items(1, chars=SHARED_CHARS)), await line.waits(items(1))
        (taken,) = line.companions(100)
        taken.settle(None)
        line.put("b")
        assert [await long, await short] == [None, "b"]


async def test_a_seat_that_came_to_somebody_who_gave_up_goes_to_the_next() -> None:
    async with asyncio.TaskGroup() as tasks:
        line = Line(tasks)
        first, second = await line.waits(items(1)), await line.waits(items(1))
        line.put("seat")
        first.cancel()
        assert await second == "seat"
        third = await line.waits(items(1))
        third.cancel()
        await asyncio.sleep(0)
        line.put("seat")
        assert line.is_idle("seat")


def test_the_pace_is_unknown_until_a_request_was_answered_and_after_a_fault() -> None:
    pace = ScoringPace()
    assert pace.num_items(1.0) == 0
    pace.note(10, 0.1)
    assert pace.num_items(1.0) == 100
    pace.note(10, 10.0)
    assert pace.num_items(1.0) == 3
    pace.forget()
    assert pace.num_items(1.0) == 0
