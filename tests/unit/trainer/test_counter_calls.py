"""Counters as replicas and the reward service tell them over the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from services.trainer.fleet.replica_client import ReplicaCounterCalls, RewardCounterCalls
from sluice.algorithm.accounting import ReplicaCounters
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.errors import PeerError, SluiceError
from sluice.rpc.client import reward_stub
from sluice.types import ReplicaInfo
from tests.support.rpc_server import connected


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    """Tells its counters."""

    num_asked = 0
    asked_without_engine = False

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.num_asked += 1
        self.asked_without_engine = request.without_engine
        return rollout_pb2.GetStatusResponse(
            instance_id="a-1",
            generated_tokens=100,
            unsent_tokens=7,
            running_tokens=3,
            seconds_by_state={"idle": 1.5, "generating": 2.5},
            wall_seconds=4.0,
            direct_sent_tokens=20,
            direct_unsent_tokens=2,
        )


@asynccontextmanager
async def serving(replica: Replica) -> AsyncIterator[ReplicaInfo]:
    server = grpc.aio.server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(replica, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield ReplicaInfo("a", "a-1", f"127.0.0.1:{port}", 8)
    finally:
        await server.stop(None)


@pytest.fixture
async def calls() -> AsyncIterator[ReplicaCounterCalls]:
    calls = ReplicaCounterCalls()
    yield calls
    await calls.close()


async def test_a_replica_tells_all_that_enters_the_books(calls: ReplicaCounterCalls) -> None:
    async with serving(Replica()) as info:
        reported = await calls.ask(info)
    seconds = {"idle": 1.5, "generating": 2.5}
    assert reported == ReplicaCounters(
        generated_tokens=100,
        unsent_tokens=7,
        running_tokens=3,
        wall_seconds=4.0,
        seconds_by_state=seconds,
        direct_sent_tokens=20,
        direct_unsent_tokens=2,
    )


async def test_the_books_do_not_wait_for_an_engines_step(calls: ReplicaCounterCalls) -> None:
    replica = Replica()
    async with serving(replica) as info:
        await calls.ask(info)
    assert replica.asked_without_engine


async def test_the_counters_of_another_process_at_the_same_address_are_not_taken(
    calls: ReplicaCounterCalls,
) -> None:
    async with serving(Replica()) as info:
        with pytest.raises(PeerError, match="process a-1 answers there"):
            await calls.ask(replace(info, instance_id="a-0"))


async def test_a_replica_that_is_gone_is_an_error(calls: ReplicaCounterCalls) -> None:
    async with serving(Replica()) as info:
        await calls.ask(info)
    with pytest.raises(SluiceError):
        await calls.ask(info)


async def test_a_replica_that_has_left_is_forgotten_and_can_come_back(
    calls: ReplicaCounterCalls,
) -> None:
    replica = Replica()
    async with serving(replica) as info:
        await calls.ask(info)
        await calls.forget_others([])
        assert not calls._channels
        await calls.ask(info)
        await calls.forget_others([info])
        assert set(calls._channels) == {"a-1"}
    assert replica.num_asked == 2


async def test_the_reward_service_tells_its_statistics() -> None:
    class Reward(reward_pb2_grpc.RewardServiceServicer):
        async def GetStatus(self, request: Any, context: Any) -> Any:
            return reward_pb2.GetStatusResponse(statistics={"reward/tokens/received": 3.0})

    async with connected(reward=Reward()) as channel:
        reported = await RewardCounterCalls(reward_stub(channel)).ask()
    assert reported == {"reward/tokens/received": 3.0}
