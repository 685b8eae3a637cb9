"""Counts how often an engine's loop answers, so that heartbeats can tell a hung engine.

Consumes: answers of the engine. Waits for: one answer at a time, for as long as it takes (its
absence is the news), and the interval between two. Unblocked by: the engine's loop. Produces: a
counter that stands still while the engine does. On failure: a broken engine's error ends the
replica. On shutdown: cancelled.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.rollout.engines.protocol import EngineLoad

_INTERVAL_S = 1.0


class ProbedEngine(Protocol):
    """What is asked; see `Engine`."""

    async def probe(self) -> EngineLoad:
        """Answers from inside the engine's loop."""
        ...


class EngineHeartbeat:
    """Asks an engine for ever.

    Args:
        engine: which.
        interval_s: between an answer and the next question.
    """

    def __init__(self, engine: ProbedEngine, interval_s: float = _INTERVAL_S) -> None:
        self._engine, self._interval_s = engine, interval_s
        self._turns = 1  # it has started

    @property
    def turns(self) -> int:
        """Answers so far, the start included."""
        return self._turns

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._engine.probe()
            self._turns += 1
            await asyncio.sleep(self._interval_s)
