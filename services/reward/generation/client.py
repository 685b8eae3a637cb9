"""Call `RolloutService.Generate` on the announced replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from services.reward.generation.request import PHASE, GenerateEvent, GroupRequest
from sluice.api.rollout.v1 import rollout_pb2
from sluice.codec.fields import token_ids_from_bytes
from sluice.codec.rollout import (
    chat_prompt_to_proto,
    new_tokens_from_proto,
    rollout_from_proto,
    rollout_to_proto,
    sampling_to_proto,
)
from sluice.errors import InvalidRequestError, PeerError
from sluice.rpc.client import open_channel, rollout_stub, stream_call
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.metadata import SERVICE_KEY
from sluice.types import ReplicaInfo, Rollout

if TYPE_CHECKING:
    import grpc

    from sluice.api.rollout.v1 import rollout_pb2_grpc


MAX_REQUEST_ID_CHARACTERS = 32


@dataclass(slots=True)
class _Channel:
    channel: grpc.aio.Channel
    stub: rollout_pb2_grpc.RolloutServiceAsyncStub
    num_streams: int = 0


class RolloutClient:
    """One channel per replica address.

    Args:
        linger_ms: finished samples may wait this long to travel together.
        timeout_s: seconds one stream may take.
        max_message_bytes: largest message.
        partial_interval_ms: milliseconds between deliveries of unfinished samples' tokens; 0: none.
        credentials: what replicas are shown.
    """

    def __init__(
        self,
        *,
        linger_ms: int,
        timeout_s: float,
        max_message_bytes: int,
        partial_interval_ms: int = 0,
        credentials: Credentials = OPEN,
    ) -> None:
        self._linger_ms, self._timeout_s = linger_ms, timeout_s
        self._partial_interval_ms = partial_interval_ms
        self._max_message_bytes, self._credentials = max_message_bytes, credentials
        self._channels: dict[str, _Channel] = {}
        self._wanted: frozenset[str] = frozenset()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for held in self._channels.values():
            await held.channel.close()
        self._channels.clear()

    async def retain(self, addresses: Collection[str]) -> None:
        """Close the channels to all other addresses, each when its last stream has ended."""
        self._wanted = frozenset(addresses)
        for address in list(self._channels):
            await self._close_unwanted(address)

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout],
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Stream the samples of one group as they come; leaving early cancels the call."""
        held = self._held(replica.address)
        held.num_streams += 1
        messages = self._stream(held, replica, self._message(request, sample_indexes, partials))
        try:
            async with aclosing(messages):
                async for message in messages:
                    yield _decode(message, replica.name)
        finally:
            held.num_streams -= 1
            await self._close_unwanted(replica.address)

    def _stream(
        self,
        held: _Channel,
        replica: ReplicaInfo,
        message: rollout_pb2.GenerateRequest,
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        return stream_call(
            held.stub.Generate,
            message,
            name="RolloutService/Generate",
            peer=replica.name,
            phase=PHASE,
            deadline_s=self._timeout_s,
        )

    def _held(self, address: str) -> _Channel:
        if address not in self._channels:
            channel = open_channel(
                address,
                max_message_bytes=self._max_message_bytes,
                credentials=self._credentials,
                metadata=lambda: ((SERVICE_KEY, "reward"),),
            )
            self._channels[address] = _Channel(channel, rollout_stub(channel))
        return self._channels[address]

    async def _close_unwanted(self, address: str) -> None:
        # Closing a channel in use would cancel its streams, which reads like our own cancellation.
        held = self._channels.get(address)
        if held is not None and held.num_streams == 0 and address not in self._wanted:
            del self._channels[address]
            await held.channel.close()

    def _message(
        self, request: GroupRequest, sample_indexes: Sequence[int], partials: Sequence[Rollout]
    ) -> rollout_pb2.GenerateRequest:
        return rollout_pb2.GenerateRequest(
            request_id=request.prompt.prompt_id[:MAX_REQUEST_ID_CHARACTERS],
            prompt=chat_prompt_to_proto(request.prompt.messages, request.prompt.images),
            sample_indexes=sample_indexes,
            sampling=sampling_to_proto(request.sampling),
            stream_mode=rollout_pb2.STREAM_MODE_SAMPLES,
            linger_ms=self._linger_ms,
            partials=[rollout_to_proto(partial) for partial in partials],
            partial_interval_ms=self._partial_interval_ms,
        )


def _decode(message: rollout_pb2.GenerateResponse, peer: str) -> GenerateEvent:
    try:
        started = None
        if message.HasField("accepted"):
            accepted = message.accepted
            tokens = token_ids_from_bytes(accepted.prompt_token_ids_u32, "prompt_token_ids_u32")
            started = (tokens, accepted.policy_version)
        return GenerateEvent(
            started,
            tuple(map(rollout_from_proto, message.rollouts)),
            tuple(map(new_tokens_from_proto, message.deltas)),
            message.engine_tokens if message.HasField("engine_tokens") else None,
        )
    except InvalidRequestError as error:
        # Report it as the replica's fault: the request is valid.
        raise PeerError(peer, PHASE, f"it sent what cannot be decoded: {error}") from error
