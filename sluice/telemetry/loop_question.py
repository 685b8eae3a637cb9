"""Asks an event loop something from another thread, and does without if the loop is blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["ask_loop"]

AnswerT = TypeVar("AnswerT")


def ask_loop(
    loop: asyncio.AbstractEventLoop, question: Callable[[], AnswerT], timeout_s: float
) -> AnswerT | None:
    """What `question` returns in the loop's thread.

    Args:
        loop: another thread's.
        question: must not block.
        timeout_s: seconds the loop has to come to it.

    Returns:
        ``None`` if the loop did not come to it, or is closed.
    """
    answer: Future[AnswerT] = Future()

    def run() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(question())
        except Exception as error:  # noqa: BLE001  raised to whoever asked
            answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:
        return None
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        # It may have come while the time ran out; or the question itself timed out.
        if answer.done():
            return answer.result()
        answer.cancel()
        return None
