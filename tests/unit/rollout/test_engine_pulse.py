"""The counter of an engine's answers stands still while the engine does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.rollout.registration import EngineHeartbeat
from sluice.errors import EngineError

WAIT_S = 10.0


class Engine:
    """Answers while its gate is open."""

    def __init__(self) -> None:
        self.gate, self.asked = asyncio.Event(), asyncio.Event()
        self.error: EngineError | None = None

    async def probe(self) -> Any:
        self.asked.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error


async def test_a_hung_engine_adds_no_turn_and_one_that_answers_does() -> None:
    engine = Engine()
    heartbeat = EngineHeartbeat(engine.probe, interval_s=0.001)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(heartbeat.run())
        await engine.asked.wait()
        await asyncio.sleep(0.02)
        assert heartbeat.turns == 1
        engine.gate.set()
        while heartbeat.turns < 4:
            await asyncio.sleep(0.001)
        beating.cancel()


async def test_the_error_of_a_broken_engine_is_not_kept_back() -> None:
    engine = Engine()
    engine.error = EngineError("out of memory")
    engine.gate.set()
    with pytest.raises(EngineError, match="out of memory"):
        await EngineHeartbeat(engine.probe).run()
