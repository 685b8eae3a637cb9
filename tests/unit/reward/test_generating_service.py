"""The reward service at a replica: distinguished from clients, with and without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from services.reward.generation.client import RolloutClient
from services.reward.generation.request import (
    GroupRequest,
    Purpose,
)
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.rpc.metadata import TRACEPARENT, caller_of
from sluice.rpc.server import RpcServer
from sluice.types import ChatMessage, Prompt, PromptOrigin, ReplicaInfo, SamplingParams

SPAN = (TRACEPARENT, "00-" + "a" * 32 + "-" + "b" * 16 + "-01")


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    """Takes note of who calls, and of the trace that the call is in."""

    def __init__(self) -> None:
        self.callers: list[tuple[str | None, bool]] = []
        self.wants_routing: list[bool] = []
        self.intervals_ms: list[int] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        in_trace = any(key == TRACEPARENT for key, _ in context.invocation_metadata())
        self.callers.append((caller_of(context, None), in_trace))
        self.wants_routing.append(request.with_routing)
        self.intervals_ms.append(request.partial_interval_ms)
        yield rollout_pb2.GenerateResponse()


@asynccontextmanager
async def running(replica: Replica) -> AsyncIterator[ReplicaInfo]:
    server = RpcServer(
        [lambda grpc_: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(replica, grpc_)],
        ["sluice.api.rollout.v1.RolloutService"],
        host="127.0.0.1",
        port=0,
        max_message_bytes=1 << 20,
    )
    await server.start()
    try:
        yield ReplicaInfo("r", "r-1", server.address, 1)
    finally:
        await server.stop(0)


async def generate(
    info: ReplicaInfo, purpose: Purpose, fleet_slots: int = 1, **settings: Any
) -> None:
    turns = (ChatMessage("user", "1"),)
    prompt = Prompt("p", 0, turns, "math_dapo", "1", PromptOrigin.CLIENT, None, {}, ())
    request = GroupRequest(prompt, (0,), SamplingParams(1.0, 1.0, -1, 8, 1), purpose, 0)
    client = RolloutClient(linger_ms=0, timeout_s=10.0, max_message_bytes=1 << 20, **settings)
    await client.adopt_fleet([info, ReplicaInfo("s", "s-1", "127.0.0.1:1", fleet_slots)])
    async with client, aclosing(client.generate(info, request, (0,), ())) as events:
        assert len([event async for event in events]) == 1


@pytest.mark.parametrize("in_trace", [False, True])
async def test_the_reward_service_is_no_client(
    in_trace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    further = {"metadata": (SPAN,)} if in_trace else {}
    monkeypatch.setattr("sluice.rpc.client.call_options", lambda *_: further)
    replica = Replica()
    async with running(replica) as info:
        await generate(info, Purpose.TRAINING)
    assert replica.callers == [(None, in_trace)]


async def test_experts_are_asked_for_only_where_passes_will_follow_them() -> None:
    replica = Replica()
    async with running(replica) as info:
        await generate(info, Purpose.TRAINING)
        await generate(info, Purpose.TRAINING, with_routing=True)
        await generate(info, Purpose.VALIDATION, with_routing=True)
    assert replica.wants_routing == [False, True, False]


async def test_the_fleet_of_the_latest_announcement_sets_the_interval_of_partial_tokens() -> None:
    replica, settings = Replica(), {"partial_interval_ms": 500, "longest_interval_ms": 7500.0}
    async with running(replica) as info:
        for slots in (10, 49_999, 10**6):
            await generate(info, Purpose.TRAINING, slots, **settings)
        await generate(info, Purpose.TRAINING, 10**6)
    assert replica.intervals_ms == [500, 5000, 7500, 0]


async def test_an_announcement_leaves_the_wait_for_the_backlog_alone() -> None:
    has_ended = asyncio.Event()
    async with RolloutClient(linger_ms=0, timeout_s=10.0, max_message_bytes=1 << 20) as client:
        client.after_backlog(has_ended.set)
        await client.adopt_fleet([])
        await asyncio.wait_for(has_ended.wait(), 60)  # else no stream would ever stall again
