"""Rollouts, sampling parameters and prompts <-> protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sluice.algorithm.growing_sample import NewTokens
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.codec.arrays import (
    logprobs_from_bytes,
    logprobs_to_bytes,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from sluice.errors import InvalidRequestError
from sluice.types import ChatMessage, FinishReason, Rollout, SamplingParams, VersionSpan

_MAX_TEMPERATURE = 100.0
_FINISH_TO_PROTO = {
    FinishReason.STOP: common.FINISH_REASON_STOP,
    FinishReason.LENGTH: common.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common.FINISH_REASON_ABORTED,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}


def rollout_to_proto(rollout: Rollout) -> common.Rollout:
    """Encodes one sample."""
    return common.Rollout(
        sample_index=rollout.sample_index,
        token_ids_u32=token_ids_to_bytes(rollout.token_ids),
        behavior_logprobs_f32=logprobs_to_bytes(rollout.behavior_logprobs),
        version_spans=[
            common.VersionSpan(version=s.version, start=s.start, end=s.end)
            for s in rollout.version_spans
        ],
        finish_reason=_FINISH_TO_PROTO[rollout.finish_reason],
        text=rollout.text,
    )


def rollout_from_proto(message: common.Rollout) -> Rollout:
    """Decodes one sample.

    Raises:
        InvalidRequestError: unknown finish reason, or arrays and spans that do not fit together.
    """
    finish_reason = _FINISH_FROM_PROTO.get(message.finish_reason)
    if finish_reason is None:
        raise InvalidRequestError(f"rollout.finish_reason: {message.finish_reason} is unknown")
    try:
        return Rollout(
            sample_index=message.sample_index,
            token_ids=token_ids_from_bytes(message.token_ids_u32, "rollout.token_ids_u32"),
            behavior_logprobs=logprobs_from_bytes(
                message.behavior_logprobs_f32, "rollout.behavior_logprobs_f32"
            ),
            version_spans=tuple(
                VersionSpan(s.version, s.start, s.end) for s in message.version_spans
            ),
            finish_reason=finish_reason,
            text=message.text,
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def new_tokens_from_proto(message: rollout.TokenDelta) -> NewTokens:
    """Decodes tokens that continue a sample.

    Raises:
        InvalidRequestError: arrays of broken length, or of different ones.
    """
    tokens = NewTokens(
        message.sample_index,
        token_ids_from_bytes(message.token_ids_u32, "delta.token_ids_u32"),
        logprobs_from_bytes(message.behavior_logprobs_f32, "delta.behavior_logprobs_f32"),
        message.policy_version,
    )
    if tokens.token_ids.shape != tokens.behavior_logprobs.shape:
        raise InvalidRequestError(
            f"delta of sample {tokens.sample_index}: {tokens.token_ids.size} token ids against "
            f"{tokens.behavior_logprobs.size} behavior logprobs"
        )
    return tokens


def sampling_to_proto(sampling: SamplingParams) -> common.SamplingParams:
    """Encodes sampling parameters; every field is set explicitly."""
    return common.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
    )


def sampling_from_proto(
    message: common.SamplingParams, *, default_seed: int, longest: int
) -> SamplingParams:
    """Decodes sampling parameters; absent fields take the protocol's defaults.

    Args:
        message: as received.
        default_seed: used when the caller gave none.
        longest: `max_tokens` when the caller gave none, tokens.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    temperature = message.temperature if message.HasField("temperature") else 1.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    top_k = message.top_k if message.HasField("top_k") else -1
    if not 0.0 <= temperature <= _MAX_TEMPERATURE:
        raise InvalidRequestError(f"sampling.temperature: {temperature} is not in [0, 100]")
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequestError(f"sampling.top_p: {top_p} is not in (0, 1]; use 1 for off")
    if top_k != -1 and top_k < 1:
        raise InvalidRequestError(f"sampling.top_k: {top_k} is neither -1 (off) nor at least 1")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=message.max_tokens or longest,
        seed=message.seed if message.HasField("seed") else default_seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
    )


def within_budget(sampling: SamplingParams, token_budget: int, num_samples: int) -> SamplingParams:
    """The same, each of `num_samples` with at most its share of `token_budget`; 0: no bound."""
    if not token_budget:
        return sampling
    return replace(sampling, max_tokens=min(sampling.max_tokens, token_budget // num_samples))


def chat_prompt_to_proto(
    messages: Sequence[ChatMessage], images: Sequence[bytes] = ()
) -> common.PromptInput:
    """Encodes a conversation, with its encoded images in order, as a prompt."""
    turns = [common.ChatMessage(role=m.role, content=m.content) for m in messages]
    return common.PromptInput(chat=common.ChatPrompt(messages=turns, images=images))


def chat_messages_from_proto(messages: Sequence[common.ChatMessage]) -> tuple[ChatMessage, ...]:
    """Decodes a conversation.

    Raises:
        InvalidRequestError: no turn, or a turn without a role.
    """
    if not messages:
        raise InvalidRequestError("messages: empty; send at least one turn")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequestError(f"messages[{index}].role: empty; use system, user, assistant")
    return tuple(ChatMessage(m.role, m.content) for m in messages)
