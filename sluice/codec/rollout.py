"""Calls to a replica: encode and decode prompts, parameters and samples; check requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from sluice.algorithm.episode_rules import CONTINUING_ROLES
from sluice.algorithm.growing_sample import NewTokens
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.codec.bounds import MAX_SAMPLE_INDEX, MAX_TEMPERATURE, check_fields
from sluice.codec.fields import (
    MAX_NUMBER,
    check_count,
    check_range,
    check_text,
    logprobs_from_bytes,
    logprobs_to_bytes,
    routing_from_proto,
    routing_to_proto,
    shorten,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from sluice.codec.tools import (
    answer_from_proto,
    answer_to_proto,
    check_calls,
    check_tool_format,
    check_tools,
    message_from_proto,
    message_to_proto,
    tools_to_proto,
)
from sluice.codec.turns import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    turns_to_proto,
    with_turns,
)
from sluice.errors import InvalidRequestError
from sluice.types import (
    ChatMessage,
    PromptLogprobs,
    Rollout,
    SamplingParams,
    ScoredPrompt,
    TokenIds,
    Tool,
    VersionSpan,
)

# Bounds on what one request may cost a replica before it generates anything.
MAX_TURNS, MAX_ROLE_BYTES = 1024, 64
MAX_STOPS, MAX_STOP_BYTES = 16, 128


def rollout_to_proto(rollout: Rollout) -> common.Rollout:
    """Encode one sample; experts may take many times the bytes of all else."""
    routing = rollout.routing
    return common.Rollout(
        sample_index=rollout.sample_index,
        token_ids_u32=token_ids_to_bytes(rollout.token_ids),
        behavior_logprobs_f32=logprobs_to_bytes(rollout.behavior_logprobs),
        version_spans=_spans_to_proto(rollout),
        finish_reason=finish_reason_to_proto(rollout.finish_reason),
        text=rollout.text,
        routing=None if routing is None else routing_to_proto(routing),
        answer=None if rollout.answer is None else answer_to_proto(rollout.answer),
    )


def rollout_outline_to_proto(rollout: Rollout) -> common.Rollout:
    """Encode what does not grow with the tokens of one sample."""
    return common.Rollout(
        sample_index=rollout.sample_index,
        version_spans=_spans_to_proto(rollout),
        finish_reason=finish_reason_to_proto(rollout.finish_reason),
        num_tokens=rollout.num_tokens,
        has_routing=rollout.routing is not None,
        turns=turns_to_proto(rollout),
    )


def rollout_outline_from_proto(message: common.Rollout) -> Rollout:
    """Decode a sample whose tokens are absent.

    Raises:
        InvalidRequestError: unknown finish reason, or spans or turns that do not fit the number of
            tokens.
    """
    try:
        joined = Rollout.absent(
            message.sample_index,
            message.num_tokens,
            _spans_from_proto(message),
            finish_reason_from_proto(message.finish_reason, "rollout.finish_reason"),
            has_routing=message.has_routing,
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    return with_turns(joined, message.turns, f"sample {message.sample_index}")


def rollout_from_proto(message: common.Rollout) -> Rollout:
    """Decode one sample.

    Raises:
        InvalidRequestError: unknown finish reason, or arrays and spans that do not fit together.
    """
    try:
        return Rollout.of_one_turn(
            sample_index=message.sample_index,
            token_ids=token_ids_from_bytes(message.token_ids_u32, "rollout.token_ids_u32"),
            behavior_logprobs=logprobs_from_bytes(
                message.behavior_logprobs_f32, "rollout.behavior_logprobs_f32"
            ),
            version_spans=_spans_from_proto(message),
            finish_reason=finish_reason_from_proto(message.finish_reason, "rollout.finish_reason"),
            text=message.text,
            routing=(
                routing_from_proto(message.routing, "rollout.routing")
                if message.HasField("routing")
                else None
            ),
            answer=answer_from_proto(message.answer) if message.HasField("answer") else None,
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def _spans_to_proto(rollout: Rollout) -> list[common.VersionSpan]:
    return [
        common.VersionSpan(version=s.version, start=s.start, end=s.end)
        for s in rollout.version_spans
    ]


def _spans_from_proto(message: common.Rollout) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(s.version, s.start, s.end) for s in message.version_spans)


def new_tokens_from_proto(message: rollout.TokenDelta) -> NewTokens:
    """Decode tokens that continue a sample.

    Raises:
        InvalidRequestError: an array has a broken length, or the lengths differ.
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


def scored_prompt_to_proto(scored: ScoredPrompt) -> rollout.PromptLogprobs:
    """Encode the logprobs of a prompt."""
    return rollout.PromptLogprobs(
        logprobs_f32=logprobs_to_bytes(scored.logprobs.logprobs),
        top_token_ids_u32=token_ids_to_bytes(scored.logprobs.top_token_ids),
        top_logprobs_f32=logprobs_to_bytes(scored.logprobs.top_logprobs),
        texts=scored.texts,
        top_texts=scored.top_texts,
    )


def scored_prompt_from_proto(message: rollout.PromptLogprobs, num_tokens: int) -> ScoredPrompt:
    """Decode the logprobs of a prompt of `num_tokens`.

    Raises:
        InvalidRequestError: they are of another number of tokens.
    """
    name = "prompt_logprobs"
    logprobs = logprobs_from_bytes(message.logprobs_f32, f"{name}.logprobs_f32")
    top_ids = token_ids_from_bytes(message.top_token_ids_u32, f"{name}.top_token_ids_u32")
    top_logprobs = logprobs_from_bytes(message.top_logprobs_f32, f"{name}.top_logprobs_f32")
    after = (logprobs.size, top_ids.size, top_logprobs.size, len(message.top_texts))
    if set(after) != {num_tokens - 1} or len(message.texts) != num_tokens:
        raise InvalidRequestError(
            f"{name}: {after} values and {len(message.texts)} texts for a prompt of {num_tokens} "
            "tokens; send one of each kind after the first token, and a text a token"
        )
    return ScoredPrompt(
        PromptLogprobs(logprobs, top_ids, top_logprobs),
        tuple(message.texts),
        tuple(message.top_texts),
    )


def sampling_to_proto(sampling: SamplingParams) -> common.SamplingParams:
    """Encode sampling parameters; set every field explicitly."""
    return common.SamplingParams(**asdict(sampling))


def sampling_from_proto(
    message: common.SamplingParams, *, default_seed: int, longest: int
) -> SamplingParams:
    """Decode sampling parameters; absent fields take the protocol's defaults.

    Args:
        default_seed: used when the caller gave none.
        longest: `max_tokens` when the caller gave none, tokens.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    temperature = message.temperature if message.HasField("temperature") else 1.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    top_k = message.top_k if message.HasField("top_k") else -1
    check_sampling(temperature, top_p, top_k, "sampling.")
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


def check_sampling(temperature: float, top_p: float, top_k: int, prefix: str = "") -> None:
    """Check the distribution of sampling. `prefix` precedes the fields' names in errors.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    check_range(f"{prefix}temperature", temperature, 0, MAX_TEMPERATURE)
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequestError(f"{prefix}top_p: {top_p} is not in (0, 1]; use 1 for off")
    if top_k != -1 and not 1 <= top_k < 1 << 31:
        raise InvalidRequestError(
            f"{prefix}top_k: {top_k} is neither -1 (off) nor in 1..{(1 << 31) - 1}"
        )


def within_budget(sampling: SamplingParams, token_budget: int, num_samples: int) -> SamplingParams:
    """Limit each of `num_samples` to its share of `token_budget`; 0: no bound."""
    if not token_budget:
        return sampling
    return replace(sampling, max_tokens=min(sampling.max_tokens, token_budget // num_samples))


def within_sequence(
    sampling: SamplingParams, max_tokens: int, num_prompt_tokens: int
) -> SamplingParams:
    """Limit a sample to what its prompt leaves of `max_tokens` tokens; 0: no bound."""
    if not max_tokens:
        return sampling
    return replace(sampling, max_tokens=min(sampling.max_tokens, max_tokens - num_prompt_tokens))


def chat_prompt_to_proto(
    messages: Sequence[ChatMessage], images: Sequence[bytes] = (), tools: Sequence[Tool] = ()
) -> common.PromptInput:
    """Encode a conversation, with its image files in order, as a prompt."""
    turns = [message_to_proto(message) for message in messages]
    return common.PromptInput(
        chat=common.ChatPrompt(messages=turns, images=images, tools=tools_to_proto(tools))
    )


def continuation_to_proto(
    token_ids: TokenIds, messages: Sequence[ChatMessage] = (), tools: Sequence[Tool] = ()
) -> common.PromptInput:
    """Encode tokens, and the turns that follow them, as a prompt."""
    return common.PromptInput(
        continuation=common.Continuation(
            token_ids_u32=token_ids_to_bytes(token_ids),
            messages=[message_to_proto(message) for message in messages],
            tools=tools_to_proto(tools),
        )
    )


def chat_messages_from_proto(messages: Sequence[common.ChatMessage]) -> tuple[ChatMessage, ...]:
    """Decode a conversation.

    Raises:
        InvalidRequestError: no turn, or a turn without a role.
    """
    if not messages:
        raise InvalidRequestError("messages: empty; send at least one turn")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequestError(f"messages[{index}].role: empty; use system, user, assistant")
    return tuple(map(message_from_proto, messages))


def new_messages_from_proto(messages: Sequence[common.ChatMessage]) -> tuple[ChatMessage, ...]:
    """Decode the turns of a continuation; there may be none.

    Raises:
        InvalidRequestError: a turn of another role than user and tool.
    """
    for index, message in enumerate(messages):
        if message.role not in CONTINUING_ROLES:
            raise InvalidRequestError(
                f"prompt.continuation.messages[{index}].role: {shorten(message.role)}; only "
                "turns of user and tool continue; send other conversations as a chat"
            )
    return tuple(map(message_from_proto, messages))


def check_generate(request: rollout.GenerateRequest, max_n: int) -> None:
    """Check names, indexes, turns and times. Raise InvalidRequestError."""
    check_fields(request)
    for kind in ("chat", "continuation"):
        prompt = getattr(request.prompt, kind)
        check_turns(f"prompt.{kind}.messages", prompt.messages, MAX_TURNS)
        for index, turn in enumerate(prompt.messages):
            check_calls(f"prompt.{kind}.messages[{index}]", turn)
        check_tools(f"prompt.{kind}.tools", prompt.tools)
    check_tool_format(request.tool_format)
    indexes = request.sample_indexes
    if not 1 <= len(indexes) <= max_n or len(set(indexes)) != len(indexes):
        raise InvalidRequestError(
            f"sample_indexes: {len(indexes)} given; send 1 to {max_n} different indexes "
            "(sluice.rollout.max_n)"
        )
    check_range("sample_indexes", max(indexes), 0, MAX_SAMPLE_INDEX)
    if request.stream_mode not in rollout.StreamMode.values():
        raise InvalidRequestError(
            f"stream_mode: {request.stream_mode} is unknown; send STREAM_MODE_SAMPLES or "
            "STREAM_MODE_TOKENS"
        )
    if request.token_budget and request.token_budget < len(indexes):
        raise InvalidRequestError(
            f"token_budget: {request.token_budget} for {len(indexes)} samples; send at least one "
            "token a sample, or 0 for no bound"
        )
    check_stops("sampling.stop", request.sampling.stop)
    if request.with_prompt_logprobs and request.prompt.chat.images:
        raise InvalidRequestError(
            "with_prompt_logprobs: true for a prompt with images, whose logprobs are not offered; "
            "send text or tokens, or leave it out"
        )
    # Partials of other samples would be decoded for nothing.
    if len(request.partials) > len(indexes):
        raise InvalidRequestError(
            f"partials: {len(request.partials)} given for {len(indexes)} samples; send at most one "
            "a sample"
        )


def check_client_priority(request: rollout.GenerateRequest, max_priority: int) -> None:
    """Raise InvalidRequestError if a client requests a higher priority than clients may."""
    if request.priority > max_priority:
        raise InvalidRequestError(
            f"priority: {request.priority}; clients may ask for {max_priority} at most: send "
            "that or less, or raise sluice.limits.max_client_priority"
        )


def check_stops(field: str, stops: Sequence[str]) -> None:
    """Check that stop texts are few and short, since each is searched for after every token.

    Raises:
        InvalidRequestError: names `field` or the element.
    """
    check_count(field, stops, MAX_STOPS)
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidRequestError(
                f"{field}[{index}]: empty; send 1 to {MAX_STOP_BYTES} bytes, or leave it out"
            )
        check_text(f"{field}[{index}]", stop, MAX_STOP_BYTES)


def check_turns(field: str, turns: Sequence[common.ChatMessage], max_turns: int) -> None:
    """Check that turns are few and roles short: each turn costs the chat template time.

    Raises:
        InvalidRequestError: names `field` or the role.
    """
    check_count(field, turns, max_turns)
    for index, turn in enumerate(turns):
        check_text(f"{field}[{index}].role", turn.role, MAX_ROLE_BYTES)


def check_partials(partials: Sequence[Rollout], longest: int) -> None:
    """Check samples to continue: at most `longest` tokens, valid versions, finite logprobs.

    Raises:
        InvalidRequestError: names the sample.
    """
    for partial in partials:
        if partial.num_tokens > longest:
            raise InvalidRequestError(
                f"partials[{partial.sample_index}].token_ids_u32: {partial.num_tokens} tokens; the "
                f"model takes {longest} in all"
            )
        for span in partial.version_spans:
            check_range(f"partials[{partial.sample_index}].version", span.version, 0, MAX_NUMBER)
        if not np.isfinite(partial.behavior_logprobs).all():
            raise InvalidRequestError(
                f"partials[{partial.sample_index}].behavior_logprobs_f32: not all are finite; "
                "send them as they came"
            )
