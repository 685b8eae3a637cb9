"""A replica says what it waits for, also while its engine hangs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.rollout.engines.protocol import EngineLoad
from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from sluice.api.rollout.v1 import rollout_pb2

NOTHING: Any = None
LOAD = EngineLoad(
    slots=8,
    slots_busy=3,
    queued=2,
    generated_tokens=40,
    unsent_tokens=2,
    running_tokens=7,
    busy_seconds=1.0,
    seconds_by_state={"generating": 1.0},
    version=7,
    weight_digest="digest",
    direct_sent_tokens=11,
    direct_unsent_tokens=1,
)


class HungEngine:
    """Knows its last counters; its loop does not answer."""

    def __init__(self) -> None:
        self.last = LOAD

    def load(self) -> EngineLoad:
        return self.last

    async def probe(self) -> EngineLoad:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def engine() -> Any:
    return HungEngine()


def status_of(engine: Any, *, without_engine: bool) -> Any:
    servicer = RolloutServicer(
        ReplicaIdentity("rollout-0", "instance-0"),
        engine,
        NOTHING,
        NOTHING,
        engine_name="torch",
        max_n=8,
    )
    request = rollout_pb2.GetStatusRequest(without_engine=without_engine)
    return servicer.GetStatus(request, NOTHING)


async def test_a_replica_whose_engine_hangs_still_says_what_it_knows(engine: Any) -> None:
    status = await status_of(engine, without_engine=True)
    assert (status.name, status.slots_busy, status.queued) == ("rollout-0", 3, 2)
    assert (status.generated_tokens, status.unsent_tokens, status.running_tokens) == (40, 2, 7)
    assert (status.direct_sent_tokens, status.direct_unsent_tokens) == (11, 1)


async def test_a_probe_of_a_hung_engine_gets_no_answer(engine: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await status_of(engine, without_engine=False)


async def test_a_replica_without_weights_waits_for_the_trainer(engine: Any) -> None:
    assert not await named_waits(engine, "trainer")
    engine.last = replace(LOAD, version=None)
    assert await named_waits(engine, "trainer") == ["sending the first weights"]


async def named_waits(engine: Any, peer: str) -> list[str]:
    status = await status_of(engine, without_engine=True)
    return [wait.phase for wait in status.wait_report.waits if wait.peer == peer]
