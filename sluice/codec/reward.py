"""Calls to the reward service: encode and decode scores, progress and leased samples; check
requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.codec.bounds import check_fields
from sluice.codec.fields import MAX_NUMBER, check_name, valid_unicode
from sluice.codec.messages import check_replicas, struct_from_proto
from sluice.codec.rollout import MAX_TURNS, check_turns
from sluice.codec.tools import (
    answer_to_proto,
    check_no_calls,
    check_role,
    check_tools,
    message_from_proto,
    message_to_proto,
    tools_from_proto,
    tools_to_proto,
)
from sluice.codec.turns import finish_reason_to_proto
from sluice.errors import InvalidRequestError
from sluice.types import (
    LARGEST_NUMBER,
    Answer,
    ChatMessage,
    DataProgress,
    FailureKind,
    FinishReason,
    Prompt,
    PromptEnd,
    Scored,
    Tool,
)

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Struct


PROMPT_END_TO_PROTO = {end: reward.PromptEnd.Value(f"PROMPT_END_{end.name}") for end in PromptEnd}
# What samples wait for that have no work at replicas.
_OUTSIDE = (FailureKind.AGENT, FailureKind.ENVIRONMENT)


def service_progress(status: reward.GetStatusResponse) -> str:
    """Return a text that changes whenever the service made progress.

    It also changes while all samples are with agents or environments.
    """
    ends, counts = sorted(status.prompts_by_end.items()), sorted(status.statistics.items())
    # Episodes have deadlines, and a sample waits for its agent without one: time is progress.
    outside = [wait.seconds for wait in status.awaited if wait.peer in _OUTSIDE]
    return f"{status.prompts_submitted} {ends} {status.groups_kept} {outside} {counts}"


def score_to_proto(scored: Scored) -> common.Score:
    """Encode a score."""
    return common.Score(
        score=scored.score,
        reward=scored.reward,
        metrics=dict(scored.metrics),
        prediction=scored.prediction,
    )


def score_from_proto(message: common.Score) -> Scored:
    """Decode a score."""
    return Scored(
        score=message.score,
        reward=message.reward,
        metrics=dict(message.metrics),
        prediction=message.prediction if message.HasField("prediction") else None,
    )


def progress_to_proto(progress: DataProgress) -> common.DataProgress:
    """Encode data progress."""
    return common.DataProgress(
        low_water=progress.low_water,
        ended_above=progress.ended_above,
        sources={name: progress_to_proto(source) for name, source in progress.sources.items()},
    )


def progress_from_proto(message: common.DataProgress) -> DataProgress:
    """Decode data progress."""
    sources = {
        name: DataProgress(source.low_water, tuple(source.ended_above))
        for name, source in message.sources.items()
    }
    return DataProgress(message.low_water, tuple(message.ended_above), sources)


def extra_info_of(struct: Struct, field: str, max_bytes: int) -> dict[str, Any]:
    """Decode further information of a prompt or response; see `struct_from_proto`."""
    return struct_from_proto(struct, field, max_bytes, "sluice.limits.max_extra_info_kb")


def check_prompt(request: reward.SubmitPromptsRequest, max_turns: int) -> None:
    """Check turns, roles, the name of the data source, and the prompt's id."""
    check_turns("messages", request.messages, max_turns)
    check_no_calls(request.messages)
    check_fields(request)
    if request.prompt_id and not request.prompt_id.isprintable():
        check_name("prompt_id", request.prompt_id)


def check_score(request: reward.ScoreRequest) -> None:
    """Check names of data sources; the service keeps statistics by them."""
    for index, item in enumerate(request.items):
        check_fields(item, f"items[{index}].")


def check_announcement(request: reward.AnnouncePolicyRequest) -> None:
    """Check trainer, version, replicas, and the position in the data set."""
    check_fields(request)
    check_replicas(request.replicas)
    _check_progress(request.resume_from, "resume_from.")
    for name, progress in request.resume_from.sources.items():
        check_name("resume_from.sources", name)
        _check_progress(progress, f"resume_from.sources['{name}'].")


def _check_progress(progress: common.DataProgress, field: str) -> None:
    check_fields(progress, field)
    # Rising positions need no sorting, and none occurs twice.
    before = progress.low_water - 1
    for position in progress.ended_above:
        if not before < position <= MAX_NUMBER:
            raise InvalidRequestError(
                f"{field}ended_above: {position} after {before}; send rising positions from "
                "low_water on"
            )
        before = position


def row_json(prompt: Prompt) -> str:
    """Return a row's columns besides its messages, the text of a JSON object."""
    row = {
        "data_source": prompt.data_source,
        "ground_truth": prompt.truth,
        "extra_info": prompt.extra_info,
    }
    return json.dumps(row, ensure_ascii=False, default=str)


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
    with valid_unicode("messages"):
        return reward.ChatRequest(
            lease_id=lease_id,
            request_digest=digest,
            messages=map(message_to_proto, messages),
            tools=tools_to_proto(tools),
        )


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
        InvalidRequestError: float32 cannot hold the reward, or there is a failure too.
    """
    check_fields(request)
    if not request.HasField("reward"):
        return None
    if not abs(request.reward) <= LARGEST_NUMBER:
        raise InvalidRequestError(
            f"reward: {request.reward}; send a finite number of at most {LARGEST_NUMBER:.2g}, or "
            "none"
        )
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
