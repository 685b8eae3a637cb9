"""The trainer fetches a batch's images apart from it, and asks anew where the lease is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from services.trainer.loop import reward_client
from services.trainer.loop.reward_client import RewardClient
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.errors import DeadlineError, PeerError
from sluice.rpc.client import reward_stub

IMAGE = bytes(1 << 20)
Images = Mapping[str, tuple[bytes, ...]]


@dataclass
class Service(reward_pb2_grpc.RewardServiceServicer):
    """Leases a batch, a new one whenever it is asked; `lost` leases are gone at once."""

    images: Images
    lost: int = 0
    sent: Images = field(default_factory=dict)
    num_taken: int = 0
    pause_s: float = 0.0
    hangs_after: int | None = None

    async def TakeBatch(self, request: Any, context: Any) -> Any:
        """The next one."""
        self.num_taken += 1
        groups = [
            reward_pb2.TrainGroup(prompt_id=name, num_images=len(images))
            for name, images in self.images.items()
        ]
        batch = reward_pb2.TrainBatch(batch_id=f"b{self.num_taken}", groups=groups)
        return reward_pb2.TakeBatchResponse(batch=batch)

    async def TakeImages(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Those of the last lease."""
        if self.num_taken <= self.lost:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not leased")
        for number, (name, images) in enumerate((self.sent or self.images).items()):
            if images:
                hangs = self.hangs_after is not None and number >= self.hangs_after
                await asyncio.sleep(60.0 if hangs else self.pause_s)
                answer = reward_pb2.TakeImagesResponse(prompt_id=name, images=images)
                await context.write(answer)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """It gets on."""
        return reward_pb2.GetStatusResponse(prompts_submitted=self.num_taken, policy_version=0)


@asynccontextmanager
async def client_of(service: Service, batch_timeout_s: float = 60.0) -> AsyncIterator[RewardClient]:
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    # No message may be as large as the images of the batch together.
    options = [("grpc.max_receive_message_length", 3 << 20)]
    try:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield RewardClient(reward_stub(channel), "trainer-1", batch_timeout_s)
    finally:
        await server.stop(0)


def no_tokens() -> int:
    return 0


async def test_a_batch_whose_images_are_larger_than_a_message_arrives_whole() -> None:
    images: Images = {"a": (IMAGE,), "b": (), **{f"c{i}": (IMAGE, b"x") for i in range(4)}}
    async with client_of(Service(images)) as client:
        batch = await client.take_batch(1, 0, no_tokens)
    assert {group.prompt_id: group.images for group in batch.groups} == images


async def test_a_lease_that_was_lost_in_between_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward_client, "_PAUSE_S", 0.01)
    service = Service({"a": (b"x",)}, lost=2)
    async with client_of(service) as client:
        batch = await client.take_batch(1, 0, no_tokens)
    assert (batch.batch_id, batch.groups[0].images) == ("b3", (b"x",))


async def test_a_batch_that_lacks_images_is_not_trained_on() -> None:
    service = Service({"a": (b"x", b"y")}, sent={"a": (b"x",)})
    async with client_of(service) as client:
        with pytest.raises(PeerError, match="group a: 1 images came for the 2"):
            await client.take_batch(1, 0, no_tokens)


async def test_images_that_do_not_come_are_a_deadline_of_their_own() -> None:
    images: Images = dict.fromkeys("abc", (b"x",))
    async with client_of(Service(images, hangs_after=2), batch_timeout_s=0.5) as client:
        expected = (
            r"reward service: no answer within 0\.5 s while taking the images of step 1.*2 of 3"
        )
        with pytest.raises(DeadlineError, match=expected):
            await client.take_batch(1, 0, no_tokens)


async def test_every_groups_images_have_the_whole_time() -> None:
    images: Images = {str(number): (b"x",) for number in range(6)}
    async with client_of(Service(images, pause_s=0.4), batch_timeout_s=2.0) as client:
        batch = await client.take_batch(1, 0, no_tokens)
    assert len(batch.groups) == 6
