"""Requests for counters of replicas and the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from services.trainer.fleet.replica_client import ReplicaClient, replica_counters
from services.trainer.loop.reward_client import RewardClient
from sluice.algorithm.accounting import ReplicaCounters
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.errors import PeerError, SluiceError
from sluice.rpc.client import ChannelPool, reward_stub
from sluice.types import ReplicaInfo
from tests.support.rpc_server import connected


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    """A replica that reports its counters while `answers` is set."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.asked_without_engine = False
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.num_asked += 1
        self.asked_without_engine = request.without_engine
        self.asked.set()
        await self.answers.wait()
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
async def calls() -> AsyncIterator[ChannelPool]:
    calls = ChannelPool(1 << 20)
    yield calls
    await calls.close()


async def test_a_replica_reports_all_counters_of_the_accounting(calls: ChannelPool) -> None:
    async with serving(Replica()) as info:
        reported = await replica_counters(calls, info)
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


async def test_counters_do_not_wait_for_an_engines_step(calls: ChannelPool) -> None:
    replica = Replica()
    async with serving(replica) as info:
        await replica_counters(calls, info)
    assert replica.asked_without_engine


async def test_the_counters_of_another_process_at_the_same_address_are_not_taken(
    calls: ChannelPool,
) -> None:
    async with serving(Replica()) as info:
        with pytest.raises(PeerError, match="process a-1 answers there"):
            await replica_counters(calls, replace(info, instance_id="a-0"))


async def test_a_replica_that_is_gone_is_an_error(calls: ChannelPool) -> None:
    async with serving(Replica()) as info:
        await replica_counters(calls, info)
    with pytest.raises(SluiceError):
        await replica_counters(calls, info)


async def test_a_replica_that_has_left_is_forgotten_and_can_come_back(
    calls: ChannelPool,
) -> None:
    replica = Replica()
    async with serving(replica) as info:
        await replica_counters(calls, info)
        first = calls.to(info.address)
        await calls.retain([])
        await replica_counters(calls, info)
        second = calls.to(info.address)
        await calls.retain([info.address])
        assert calls.to(info.address) is second is not first
    assert replica.num_asked == 2


async def test_a_replica_that_leaves_during_the_call_still_reports_its_counters(
    calls: ChannelPool,
) -> None:
    replica = Replica()
    replica.answers.clear()
    async with serving(replica) as info, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        reported = tasks.create_task(replica_counters(calls, info))
        await replica.asked.wait()
        await calls.retain([])
        replica.answers.set()
    assert reported.result().generated_tokens == 100


async def test_the_channel_of_a_delivery_outlives_the_membership(calls: ChannelPool) -> None:
    async with serving(Replica()) as info:
        steering = ReplicaClient(
            info, calls, timeout_s=5.0, transfer_timeout_s=5.0, commit_timeout_s=5.0
        )
        channel = calls.to(info.address)
        await calls.retain([])
        await steering.probe(5.0)
        assert calls.to(info.address) is channel
        await steering.close()
        await calls.retain([])
        assert calls.to(info.address) is not channel


async def test_the_reward_service_tells_its_statistics() -> None:
    class Reward(reward_pb2_grpc.RewardServiceServicer):
        async def GetStatus(self, request: Any, context: Any) -> Any:
            return reward_pb2.GetStatusResponse(statistics={"reward/tokens/received": 3.0})

    async with connected(reward=Reward()) as channel:
        reported = await RewardClient(reward_stub(channel), "trainer-1", 60.0).counters()
    assert reported == {"reward/tokens/received": 3.0}
