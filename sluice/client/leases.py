"""Samples leased from a run: take them, request answers for them, and end them.

Leases survive a restart of the reward service. So requests and ends, which may be repeated, wait
for it to come back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.client.channels import ServiceChannels
from sluice.codec.reward import chat_to_proto
from sluice.codec.tools import answer_from_proto, message_from_proto
from sluice.errors import SluiceError
from sluice.rpc.client import reward_stub, unary_call
from sluice.rpc.retries import Retries, RetryPolicy, is_absence
from sluice.types import Answer, ChatMessage, Tool

_MAX_DEFECTS = 3
_SECRET_BYTES = 24
_ACCEPTED_S = 30.0
"""A call that fails after so many seconds had reached the service."""

AnswerT = TypeVar("AnswerT")


class LeasedSample(NamedTuple):
    """A sample to work on.

    Args:
        lease_id: secret; requests and the end carry it.
        prompt_id: the prompt id of its group.
        sample_index: its index within the group.
        messages: the row's prompt.
        row_json: the row's further columns, the text of a JSON object.
        deadline_s: seconds until it expires.
    """

    lease_id: str
    prompt_id: str
    sample_index: int
    messages: tuple[ChatMessage, ...]
    row_json: str
    deadline_s: float


class LeasedAnswer(NamedTuple):
    """An answer of the policy, recorded as a turn of the sample.

    Args:
        answer: the parsed answer.
        is_cut: it ended at the token limit.
        num_read: tokens that the policy read.
        num_sampled: tokens of the answer.
        turn: its number in the sample, from 0.
    """

    answer: Answer
    is_cut: bool
    num_read: int
    num_sampled: int
    turn: int


class Leases:
    """The leased samples of one run.

    Args:
        address: host:port of the reward service.
        policy: how long `chat` and `end` wait for a reward service that is away.

    Attributes:
        holder: the secret id under which it leases.
    """

    def __init__(self, channels: ServiceChannels, address: str, policy: RetryPolicy) -> None:
        self._channels, self._address, self._policy = channels, address, policy
        self.holder = secrets.token_urlsafe(_SECRET_BYTES)

    async def take(
        self, count: int, wait_s: float = 20.0, keep_alive_s: float = 0.0
    ) -> list[LeasedSample]:
        """Lease at most `count` samples, those of the oldest groups first.

        Args:
            count: at most 1024; 0 only keeps this object's leases alive.
            wait_s: most seconds to wait for the first one, at most 60; then there are none.
            keep_alive_s: seconds, at most 3600; all leases of this object fail if none of its calls
                comes for so long. 0: they do not.

        Raises:
            InvalidRequestError: the run leases no samples.
            SluiceError: the reward service does not answer.
        """
        response = await unary_call(
            self._stub().LeaseSamples,
            reward.LeaseSamplesRequest(
                count=count, wait_s=wait_s, holder=self.holder, keep_alive_s=keep_alive_s
            ),
            peer=self._address,
            phase="leasing samples",
        )
        return [
            LeasedSample(
                lease.lease_id,
                lease.prompt_id,
                lease.sample_index,
                tuple(map(message_from_proto, lease.messages)),
                lease.row_json,
                lease.deadline_s,
            )
            for lease in response.leases
        ]

    async def chat(
        self, lease_id: str, digest: str, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> LeasedAnswer:
        """Return the policy's answer to a whole conversation.

        Args:
            lease_id: of the sample.
            digest: identifies the request; the same one is sampled once.
            messages: the conversation.
            tools: the tools that the policy may call; they replace those of the request before.

        Raises:
            NotFoundError: the lease is unknown, or has expired.
            LeaseEndedError: the sample has ended, or no token is left.
            InvalidRequestError: a message or a tool is not valid.
            SluiceError: the reward service does not answer for the policy's patience.
        """
        request = chat_to_proto(lease_id, digest, messages, tools)
        self._channels.check_size("messages", request)
        response = await self._call_with_retries(
            "asking for an answer",
            lambda phase: unary_call(self._stub().Chat, request, peer=self._address, phase=phase),
        )
        return LeasedAnswer(
            answer_from_proto(response.answer),
            response.finish_reason == common.FINISH_REASON_LENGTH,
            response.prompt_tokens,
            response.completion_tokens,
            response.turn,
        )

    async def end(self, lease_id: str, *, reward_value: float | None, failure: str = "") -> None:
        """End a sample. Repeating the call with the same end has no effect.

        Args:
            lease_id: of the sample.
            reward_value: its reward; ``None``: the row's scorer grades the last answer.
            failure: why its program failed; empty if it did not.

        Raises:
            NotFoundError: the lease is unknown, or has expired.
            LeaseEndedError: the sample has ended in another way.
            InvalidRequestError: the reward is not finite.
            SluiceError: the reward service does not answer for the policy's patience.
        """
        request = reward.EndEpisodeRequest(lease_id=lease_id, failure=failure)
        if reward_value is not None:
            request.reward = reward_value
        await self._call_with_retries(
            "ending a sample",
            lambda phase: unary_call(
                self._stub().EndEpisode, request, peer=self._address, phase=phase
            ),
        )

    async def _call_with_retries(
        self, phase: str, make: Callable[[str], Awaitable[AnswerT]]
    ) -> AnswerT:
        """Repeat a call while the reward service is away."""
        retries = Retries(
            self._policy, self._address, phase, retries_on=is_absence, max_defects=_MAX_DEFECTS
        )

        async def attempt() -> AnswerT:
            began_s = time.monotonic()
            try:
                return await make(phase)
            except SluiceError:
                if time.monotonic() - began_s >= _ACCEPTED_S:
                    retries.note_progress()  # else two restarts during one answer are one absence
                raise

        return await retries.call(attempt)

    def _stub(self) -> reward_pb2_grpc.RewardServiceAsyncStub:
        return reward_stub(self._channels.to(self._address))
