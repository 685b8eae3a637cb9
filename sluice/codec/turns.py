"""The turns of an episode, encoded beside the tokens that were sampled in all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeVar

from sluice.api.common.v1 import common_pb2 as common
from sluice.codec.fields import token_ids_from_bytes, token_ids_to_bytes
from sluice.errors import InvalidRequestError
from sluice.types import (
    FinishReason,
    Logprobs,
    Rollout,
    TokenIds,
    Turn,
    VersionSpan,
    absent_logprobs,
    absent_tokens,
)

_FINISH_TO_PROTO = {
    FinishReason.STOP: common.FINISH_REASON_STOP,
    FinishReason.LENGTH: common.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common.FINISH_REASON_ABORTED,
}
_FINISH_FROM_PROTO: dict[int, FinishReason] = {v: k for k, v in _FINISH_TO_PROTO.items()}

_Values = TypeVar("_Values", TokenIds, Logprobs)


def finish_reason_to_proto(reason: FinishReason) -> common.FinishReason.ValueType:
    """Encode why a turn ended."""
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: int, field: str) -> FinishReason:
    """Decode why a turn ended.

    Raises:
        InvalidRequestError: names `field`.
    """
    found = _FINISH_FROM_PROTO.get(value)
    if found is None:
        raise InvalidRequestError(f"{field}: {value} is unknown")
    return found


def turns_to_proto(rollout: Rollout, *, with_context: bool) -> list[common.Turn]:
    """Encode the turns of an episode; an answer to the group's prompt has none.

    Args:
        rollout: the sample.
        with_context: send what each turn read; else only its length.
    """
    if rollout.is_plain:
        return []
    return [_turn_to_proto(turn, with_context=with_context) for turn in rollout.turns]


def with_turns(joined: Rollout, messages: Sequence[common.Turn], name: str) -> Rollout:
    """Return a sample of one turn as the episode that these turns make of its tokens.

    What a turn read is absent where only its length came. The last turn has the sample's text and
    answer.

    Args:
        joined: the tokens of all turns, as one turn.
        messages: the turns; none: the sample stays as it is.
        name: of the sample, for errors.

    Raises:
        InvalidRequestError: the turns do not fit the tokens or one another; names the turn.
    """
    if not messages:
        return joined
    turns = [_turn_from_proto(one, f"{name}, turn {i}") for i, one in enumerate(messages)]
    turns[-1] = replace(turns[-1], text=joined.text, answer=joined.answer)
    sizes = [message.num_tokens for message in messages]
    if sum(sizes) != joined.num_tokens:
        raise InvalidRequestError(
            f"{name}: {sum(sizes)} tokens of turns for the {joined.num_tokens} it has"
        )
    try:
        parted = zip(
            turns,
            _parts(joined.token_ids, sizes),
            _parts(joined.behavior_logprobs, sizes),
            _span_parts(joined.version_spans, sizes),
            strict=True,
        )
        return replace(
            joined,
            turns=tuple(
                replace(turn, token_ids=tokens, behavior_logprobs=logprobs, version_spans=spans)
                for turn, tokens, logprobs, spans in parted
            ),
        )
    except ValueError as error:
        raise InvalidRequestError(f"{name}: {error}") from error


def with_tokens(
    rollout: Rollout, token_ids: TokenIds, logprobs: Logprobs, context: TokenIds
) -> Rollout:
    """Return an absent sample with its tokens.

    Args:
        rollout: the sample, with the lengths.
        token_ids: [tokens] of all turns.
        logprobs: [tokens].
        context: [read tokens] of all turns.

    Raises:
        ValueError: lengths differ.
    """
    if context.size != rollout.num_context_tokens:
        raise ValueError(
            f"{context.size} read tokens came for the {rollout.num_context_tokens} it has"
        )
    if logprobs.shape != token_ids.shape:
        raise ValueError(f"{token_ids.size} token ids against {logprobs.size} behavior logprobs")
    sizes = [turn.token_ids.size for turn in rollout.turns]
    parted = zip(
        rollout.turns,
        _parts(token_ids, sizes),
        _parts(logprobs, sizes),
        _parts(context, [turn.context.size for turn in rollout.turns]),
        strict=True,
    )
    return replace(
        rollout,
        turns=tuple(
            replace(turn, token_ids=tokens, behavior_logprobs=own, context=read)
            for turn, tokens, own, read in parted
        ),
    )


def _turn_to_proto(turn: Turn, *, with_context: bool) -> common.Turn:
    return common.Turn(
        parent=turn.parent,
        is_new_root=turn.is_new_root,
        num_tokens=turn.token_ids.size,
        context_token_ids_u32=token_ids_to_bytes(turn.context) if with_context else b"",
        num_context_tokens=0 if with_context else turn.context.size,
        finish_reason=finish_reason_to_proto(turn.finish_reason),
        reward=turn.reward,
    )


def _turn_from_proto(message: common.Turn, name: str) -> Turn:
    """Decode a turn whose tokens are absent, except for those that it read if they came."""
    parent = message.parent if message.HasField("parent") else None
    context = absent_tokens(message.num_context_tokens)
    if message.context_token_ids_u32:
        context = token_ids_from_bytes(message.context_token_ids_u32, f"{name}, context")
    if message.is_new_root and (parent is not None or not context.size):
        wrong = "it continues another" if parent is not None else "it has read nothing"
        raise InvalidRequestError(f"{name}: is_new_root, but {wrong}")
    reward = message.reward if message.HasField("reward") else None
    if reward is not None and not math.isfinite(reward):
        raise InvalidRequestError(f"{name}: its reward is {reward}; send a finite one, or none")
    return Turn(
        absent_tokens(0),
        absent_logprobs(0),
        (),
        finish_reason_from_proto(message.finish_reason, f"{name}, finish_reason"),
        "",
        parent=parent,
        context=context,
        is_new_root=message.is_new_root,
        reward=reward,
    )


def _parts(values: _Values, sizes: Sequence[int]) -> Iterator[_Values]:
    for start, end in pairwise(accumulate(sizes, initial=0)):
        yield values[start:end]


def _span_parts(
    spans: Sequence[VersionSpan], sizes: Sequence[int]
) -> Iterator[tuple[VersionSpan, ...]]:
    """Cut spans of all tokens where turns end."""
    for start, end in pairwise(accumulate(sizes, initial=0)):
        yield tuple(
            VersionSpan(span.version, max(span.start, start) - start, min(span.end, end) - start)
            for span in spans
            if span.start < end and span.end > start
        )
