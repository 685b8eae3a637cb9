"""Call `RolloutService.Generate` on the announced replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Self

from services.reward.generation.request import PHASE, GenerateEvent, GroupRequest, Purpose
from sluice.algorithm.groups.stragglers import partial_interval_ms
from sluice.api.common.v1 import common_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.codec.fields import token_ids_from_bytes
from sluice.codec.rollout import (
    chat_prompt_to_proto,
    continuation_to_proto,
    new_tokens_from_proto,
    rollout_from_proto,
    rollout_to_proto,
    sampling_to_proto,
)
from sluice.errors import InvalidRequestError, PeerError
from sluice.rpc.client import NOBODY, ChannelPool, call_after_backlog, rollout_stub, stream_call
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.metadata import SERVICE_KEY
from sluice.types import ReplicaInfo, Rollout

MAX_REQUEST_ID_CHARACTERS = 32


class RolloutClient:
    """Stream samples from replicas, over one channel to each address.

    Args:
        linger_ms: finished samples may wait this long to travel together.
        timeout_s: seconds one stream may take.
        max_message_bytes: largest message.
        partial_interval_ms: shortest interval between deliveries of unfinished samples' tokens,
            longer for a large fleet (`stragglers.partial_interval_ms`); 0 delivers none.
        longest_interval_ms: longest such interval.
        with_routing: ask for the engine's experts with training samples.
        credentials: identify this service to replicas.
    """

    def __init__(
        self,
        *,
        linger_ms: int,
        timeout_s: float,
        max_message_bytes: int,
        partial_interval_ms: int = 0,
        longest_interval_ms: float = 0.0,
        with_routing: bool = False,
        credentials: Credentials = OPEN,
    ) -> None:
        self._linger_ms, self._timeout_s = linger_ms, timeout_s
        self._min_interval_ms = self._partial_interval_ms = partial_interval_ms
        self._longest_interval_ms = longest_interval_ms
        self._with_routing = with_routing
        self._channels = ChannelPool(
            max_message_bytes, credentials, metadata=lambda: ((SERVICE_KEY, "reward"),)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channels.close()

    async def adopt_fleet(self, replicas: Collection[ReplicaInfo]) -> None:
        """Adopt the fleet; close the channel to each other replica when its last stream has
        ended."""
        self._partial_interval_ms = partial_interval_ms(
            self._min_interval_ms,
            sum(replica.slots for replica in replicas),
            self._longest_interval_ms,
        )
        await self._channels.retain({NOBODY, *(replica.address for replica in replicas)})

    def after_backlog(self, callback: Callable[[], None]) -> None:
        """Call `callback` after everything that replicas have sent by now is read."""
        call_after_backlog(self._channels.to(NOBODY), callback)

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout],
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Stream the samples of one group as they come; leaving early cancels the call."""
        generate_request = self._message(request, sample_indexes, partials)
        channel = self._channels.acquire(replica.address)
        messages = stream_call(
            rollout_stub(channel).Generate,
            generate_request,
            name="RolloutService/Generate",
            peer=replica.name,
            phase=PHASE,
            deadline_s=self._timeout_s,
        )
        try:
            async with aclosing(messages):
                async for message in messages:
                    yield _decode(message, replica.name)
                    del message  # see `stream_call`
        finally:
            await self._channels.release(replica.address)

    def _message(
        self, request: GroupRequest, sample_indexes: Sequence[int], partials: Sequence[Rollout]
    ) -> rollout_pb2.GenerateRequest:
        turn = request.turn
        is_training = request.purpose is Purpose.TRAINING
        return rollout_pb2.GenerateRequest(
            request_id=request.prompt.prompt_id[:MAX_REQUEST_ID_CHARACTERS],
            prompt=_prompt(request),
            sample_indexes=sample_indexes,
            sampling=sampling_to_proto(request.sampling),
            stream_mode=rollout_pb2.STREAM_MODE_SAMPLES,
            linger_ms=self._linger_ms,
            partials=[rollout_to_proto(partial) for partial in partials],
            partial_interval_ms=self._partial_interval_ms,
            # The experts of several turns would have to be joined.
            with_routing=self._with_routing and is_training and turn is None,
            tool_format=turn.tool_format if turn else "",
            affinity=turn.affinity if turn else "",
            max_sequence_tokens=turn.max_sequence_tokens if turn else 0,
        )


def _prompt(request: GroupRequest) -> common_pb2.PromptInput:
    turn = request.turn
    if turn is None:
        return chat_prompt_to_proto(request.prompt.messages, request.prompt.images)
    if turn.earlier is None:
        return chat_prompt_to_proto(turn.messages, tools=turn.tools)
    return continuation_to_proto(turn.earlier, turn.messages, turn.tools)


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
            message.accepted.continued_text,
        )
    except InvalidRequestError as error:
        # Report it as the replica's fault: the request is valid.
        raise PeerError(peer, PHASE, f"it sent data that cannot be decoded: {error}") from error
