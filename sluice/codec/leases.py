"""Leased samples: check and decode what programs send, encode what they get, and the reverse for
their side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.codec.bounds import check_fields
from sluice.codec.environment import check_role, row_json
from sluice.codec.rollout import MAX_TURNS, check_turns
from sluice.codec.tools import (
    answer_to_proto,
    check_tools,
    message_from_proto,
    message_to_proto,
    tools_from_proto,
    tools_to_proto,
)
from sluice.codec.turns import finish_reason_to_proto
from sluice.errors import InvalidRequestError
from sluice.types import Answer, ChatMessage, FinishReason, Prompt, Tool


def lease_to_proto(
    prompt: Prompt, *, lease_id: str, sample_index: int, deadline_s: float
) -> reward.Lease:
    """Encode a leased sample."""
    return reward.Lease(
        lease_id=lease_id,
        prompt_id=prompt.prompt_id,
        sample_index=sample_index,
        messages=map(message_to_proto, prompt.messages),
        row_json=row_json(prompt),
        deadline_s=deadline_s,
    )


def chat_to_proto(
    lease_id: str, digest: str, messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> reward.ChatRequest:
    """Encode a request for an answer.

    Raises:
        InvalidRequestError: a text is not valid Unicode.
    """
    try:
        return reward.ChatRequest(
            lease_id=lease_id,
            request_digest=digest,
            messages=map(message_to_proto, messages),
            tools=tools_to_proto(tools),
        )
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"messages: not valid Unicode: {error}") from error


def conversation_of(
    request: reward.ChatRequest,
) -> tuple[tuple[ChatMessage, ...], tuple[Tool, ...]]:
    """Check a request, and return its conversation and tools.

    Raises:
        InvalidRequestError: names the field.
    """
    check_fields(request)
    if not request.messages:
        raise InvalidRequestError("messages: empty; send the whole conversation")
    check_turns("messages", request.messages, MAX_TURNS)
    for index, turn in enumerate(request.messages):
        check_role(f"messages[{index}]", turn, is_whole=True)
    check_tools("tools", request.tools)
    return tuple(map(message_from_proto, request.messages)), tools_from_proto(request.tools)


def reward_of(request: reward.EndEpisodeRequest) -> float | None:
    """Check the end of a sample, and return its reward.

    Raises:
        InvalidRequestError: the reward is not finite, or there is a failure too.
    """
    check_fields(request)
    if not request.HasField("reward"):
        return None
    if not math.isfinite(request.reward):
        raise InvalidRequestError(f"reward: {request.reward}; send a finite number, or none")
    if request.failure:
        raise InvalidRequestError("reward: set together with failure; send one of them")
    return request.reward


def chat_answer_to_proto(
    answer: Answer, finish: FinishReason, *, num_read: int, num_sampled: int, turn: int
) -> reward.ChatResponse:
    """Encode an answer."""
    return reward.ChatResponse(
        answer=answer_to_proto(answer),
        finish_reason=finish_reason_to_proto(finish),
        prompt_tokens=num_read,
        completion_tokens=num_sampled,
        turn=turn,
    )
