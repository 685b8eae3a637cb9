"""Prompts drawn from an iterable: in the event loop's thread, or in one of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from sluice.client.policy_client import NewPrompt


class PromptReader(Protocol):
    """Gives one prompt after another."""

    def is_ready(self) -> bool:
        """Whether `take` has something to give; if not, it is seen to that it will."""

    def take(self) -> NewPrompt | None:
        """The next prompt; ``None`` at the end. Raises what the iterable raised."""

    def close(self) -> None:
        """No more are taken."""


class InlinePromptReader:
    """Draws in the thread that takes: what the iterable waits for, the event loop waits for."""

    def __init__(self, prompts: Iterable[NewPrompt]) -> None:
        self._prompts = iter(prompts)

    def is_ready(self) -> bool:
        """Always."""
        return True

    def take(self) -> NewPrompt | None:
        """Draws it."""
        return next(self._prompts, None)

    def close(self) -> None:
        """Nothing is open."""


class _ReadPrompt(NamedTuple):
    prompt: NewPrompt | None
    failure: Exception | None = None


class ThreadedPromptReader:
    """Draws in a thread of its own, so that the iterable may wait, also for the event loop.

    One prompt is drawn at a time, when it is asked for. Nobody waits for the thread: a draw that
    never ends outlives `close`, and keeps no process from ending.

    Args:
        prompts: iterated by that thread alone.
        on_ready: called in the event loop when a prompt has come, or the end.
    """

    def __init__(self, prompts: Iterable[NewPrompt], on_ready: Callable[[], None]) -> None:
        self._prompts, self._on_ready = prompts, on_ready
        self._asks: SimpleQueue[bool] = SimpleQueue()
        self._has_started, self._is_asked = False, False
        self._pending: _ReadPrompt | None = None

    def is_ready(self) -> bool:
        """Whether one has come; it is asked for if it was not yet."""
        if self._pending is None and not self._is_asked:
            self._start()
            self._is_asked = True
            self._asks.put(True)
        return self._pending is not None

    def take(self) -> NewPrompt | None:
        """The one that has come, after `is_ready`."""
        assert self._pending is not None
        sampled, self._pending = self._pending, None
        if sampled.failure is not None:
            raise sampled.failure
        return sampled.prompt

    def close(self) -> None:
        """The thread ends, at once or after the draw that it is in."""
        self._asks.put(False)

    def _start(self) -> None:
        if self._has_started:
            return
        self._has_started = True
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._read, args=(loop,), name="sluice prompts", daemon=True
        ).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        prompts: Iterator[NewPrompt] | None = None
        while self._asks.get():
            try:
                prompts = iter(self._prompts) if prompts is None else prompts
                sampled = _ReadPrompt(next(prompts, None))
            except BaseException as error:  # noqa: BLE001 - it belongs to who waits
                sampled = _ReadPrompt(None, _chained(error))
            try:
                loop.call_soon_threadsafe(self._put, sampled)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _put(self, sampled: _ReadPrompt) -> None:
        self._pending, self._is_asked = sampled, False
        self._on_ready()


def _chained(error: BaseException) -> Exception:
    """What ends a program must not end the event loop of those who wait."""
    if isinstance(error, Exception):
        return error
    reported = RuntimeError(f"the iterable of prompts raised {type(error).__name__}: {error}")
    reported.__cause__ = error
    return reported
