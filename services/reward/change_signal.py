"""Wakes everyone who waits for a change of shared state, without polling."""

from __future__ import annotations

import asyncio


class ChangeSignal:
    """Take `next_change` before looking at the state, then wait for it: no change is missed.

    Args:
        then: notified as well, after this one.
    """

    def __init__(self, then: ChangeSignal | None = None) -> None:
        self._event = asyncio.Event()
        self._then = then

    def next_change(self) -> asyncio.Event:
        """Set at the first `notify` from now on."""
        return self._event

    def notify(self) -> None:
        """Wake all waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()
        if self._then is not None:
            self._then.notify()
