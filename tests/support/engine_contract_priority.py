"""What every inference engine promises of samples that wait for a slot."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.support.causal_lms import request
from tests.support.engine_contract_calls import BATCH, ENDLESS, WAIT_S, chunks_of, until
from tests.support.engine_contract_world import SLOTS, ContractWorld


class PriorityContract:
    """Rules of priorities, on a running engine that any rule may have used before."""

    async def test_of_samples_that_wait_the_one_of_the_highest_priority_goes_first(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        ended: list[int] = []

        async def draw(priority: int) -> None:
            wanted = request(samples=BATCH, max_tokens=3)
            await chunks_of(world.engine, replace(wanted, priority=priority))
            ended.append(priority)

        filling = request(samples=SLOTS - BATCH, max_tokens=ENDLESS)
        freed = request(samples=BATCH, max_tokens=ENDLESS)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            most = tasks.create_task(chunks_of(world.engine, filling))
            last = tasks.create_task(chunks_of(world.engine, freed))
            await until(lambda: world.engine.load().slots_busy == SLOTS)
            async with asyncio.TaskGroup() as waiting:
                for queued, priority in enumerate((0, -5, 7, 3), start=1):
                    waiting.create_task(draw(priority))
                    await until(lambda n=queued: world.engine.load().queued == n * BATCH)  # type: ignore[misc]
                for _ in range(2):  # what was sent before has reached the engine then
                    await world.engine.probe()
                last.cancel()
            most.cancel()
        assert ended == [7, 3, 0, -5]
