"""An event loop is asked from another thread, and a blocked one is done without."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest

from sluice.telemetry import metrics
from sluice.telemetry.metrics import ask_loop


async def test_the_question_is_answered_in_the_loops_thread() -> None:
    loop, own = asyncio.get_running_loop(), threading.get_ident()
    assert await asyncio.to_thread(ask_loop, loop, threading.get_ident, 20.0) == own


async def test_an_error_of_the_question_is_raised_in_the_caller() -> None:
    def fail() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await asyncio.to_thread(ask_loop, asyncio.get_running_loop(), fail, 20.0)


def test_a_blocked_loop_is_done_without_and_not_asked_later() -> None:
    asked: list[int] = []

    async def blocked() -> object:
        loop, answers = asyncio.get_running_loop(), list[object]()
        asking = threading.Thread(
            target=lambda: answers.append(ask_loop(loop, lambda: asked.append(1), 0.05))
        )
        asking.start()
        asking.join(60)  # the loop does not run meanwhile
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return answers

    assert asyncio.run(blocked()) == [None]
    assert asked == []


async def test_an_answer_that_comes_as_the_time_runs_out_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(answers: list[Future[int]], timeout_s: float) -> object:
        assert timeout_s < 1.0
        wait(answers, 20.0)
        return SimpleNamespace(done=set())

    monkeypatch.setattr(metrics, "wait", late)
    assert await asyncio.to_thread(ask_loop, asyncio.get_running_loop(), lambda: 7, 0.05) == 7


def test_a_closed_loop_answers_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert ask_loop(loop, lambda: 1, 20.0) is None
