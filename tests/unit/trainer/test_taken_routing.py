"""The engine's experts on their way from the reward service's batch to the trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest

from services.trainer.loop import reward_client
from services.trainer.loop.reward_client import RewardClient
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.codec.reward import expert_messages, train_batch_to_proto
from sluice.errors import PeerError
from sluice.rpc.client import reward_stub
from sluice.types import TrainBatch, TrainGroup
from tests.support.tiny_policy import make_batch, routed


@dataclass
class Service(reward_pb2_grpc.RewardServiceServicer):
    """Leases one batch; the first `lost` leases are gone at once.

    `left_out` experts do not come, and `repeated` come twice.
    """

    batch: TrainBatch
    lost: int = 0
    left_out: int = 0
    repeated: int = 0
    num_taken: int = 0

    async def TakeBatch(self, request: Any, context: Any) -> Any:
        """Lease it."""
        self.num_taken += 1
        return reward_pb2.TakeBatchResponse(batch=train_batch_to_proto(self.batch))

    async def TakeRouting(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        """Stream its experts."""
        assert request.batch_id == self.batch.batch_id
        if self.num_taken <= self.lost:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not leased")
        messages = list(expert_messages(self.batch))
        for message in messages[self.left_out :] + messages[: self.repeated]:
            yield message

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Report progress."""
        return reward_pb2.GetStatusResponse(prompts_submitted=self.num_taken, policy_version=0)


@asynccontextmanager
async def client_of(service: Service, max_bytes: int = -1) -> AsyncIterator[RewardClient]:
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    options = [("grpc.max_receive_message_length", max_bytes)]
    try:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield RewardClient(reward_stub(channel), "trainer-1", 60.0)
    finally:
        await server.stop(0)


def no_tokens() -> int:
    return 0


@pytest.fixture
def batch() -> TrainBatch:
    made = routed(make_batch(6), num_experts=300)
    return replace(made, groups=tuple(_deeper(group) for group in made.groups))


def _deeper(group: TrainGroup) -> TrainGroup:
    """The group, with experts in 16 layers: they are most of a batch."""
    rollouts = []
    for one in group.rollouts:
        assert one.routing is not None
        rollouts.append(one.with_routing(one.routing.repeat(8, axis=1)))
    return replace(group, rollouts=tuple(rollouts))


def sizes(batch: TrainBatch) -> Iterator[int]:
    return (len(one.SerializeToString()) for one in expert_messages(batch))


async def test_experts_larger_than_a_message_together_arrive_with_their_samples(
    batch: TrainBatch,
) -> None:
    limit = 2 * max(sizes(batch)) + len(train_batch_to_proto(batch).SerializeToString())
    assert sum(sizes(batch)) > limit
    async with client_of(Service(batch), limit) as client:
        found = await client.take_batch(1, 0, no_tokens)
    assert found.num_routed == batch.num_routed == 24
    for group, expected in zip(found.groups, batch.groups, strict=True):
        for one, other in zip(group.rollouts, expected.rollouts, strict=True):
            assert one.routing is not None
            assert other.routing is not None
            np.testing.assert_array_equal(one.routing, other.routing)
            assert one.routing.dtype == np.uint16


async def test_a_lease_that_was_lost_in_between_is_asked_for_again(
    batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_client, "_PAUSE_S", 0.01)
    service = Service(batch, lost=1)
    async with client_of(service) as client:
        assert (await client.take_batch(1, 0, no_tokens)).num_routed == 24
    assert service.num_taken == 2


async def test_a_batch_that_lacks_experts_is_not_trained_on(batch: TrainBatch) -> None:
    async with client_of(Service(batch, left_out=1)) as client:
        with pytest.raises(PeerError, match="experts of 23 of 24 samples came"):
            await client.take_batch(1, 0, no_tokens)


async def test_a_stream_of_more_experts_than_the_batch_has_is_refused(batch: TrainBatch) -> None:
    async with client_of(Service(batch, repeated=1)) as client:
        with pytest.raises(PeerError, match="more than 24 samples' experts came; the batch is"):
            await client.take_batch(1, 0, no_tokens)
