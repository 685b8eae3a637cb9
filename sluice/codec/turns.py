"""The turns of an episode, encoded beside the tokens that were sampled in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeVar

from sluice.api.common.v1 import common_pb2 as common
from sluice.errors import InvalidRequestError
from sluice.types import (
    LARGEST_NUMBER,
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
    reason: common.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
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
    reason = _FINISH_FROM_PROTO.get(value)
    if reason is None:
        raise InvalidRequestError(f"{field}: {value} is unknown")
    return reason


def turns_to_proto(rollout: Rollout) -> list[common.Turn]:
    """Encode the turns of an episode, without tokens; an answer to the group's prompt has none."""
    if rollout.is_plain:
        return []
    return list(map(_turn_to_proto, rollout.turns))


def with_turns(joined: Rollout, messages: Sequence[common.Turn], name: str) -> Rollout:
    """Return an absent sample of one turn as the episode that these turns make of its tokens.

    Args:
        joined: the tokens of all turns, as one turn.
        messages: the turns; none: the sample stays as it is.
        name: of the sample, for errors.

    Raises:
        InvalidRequestError: the turns do not fit the tokens or one another; names the turn.
    """
    if not messages:
        return joined
    turns = [
        _turn_from_proto(turn_message, f"{name}, turn {i}")
        for i, turn_message in enumerate(messages)
    ]
    sizes = [message.num_tokens for message in messages]
    if sum(sizes) != joined.num_tokens:
        raise InvalidRequestError(
            f"{name}: {sum(sizes)} tokens of turns for the {joined.num_tokens} it has"
        )
    try:
        parted = zip(turns, sizes, _split_spans(joined.version_spans, sizes), strict=True)
        return replace(
            joined,
            turns=tuple(
                replace(
                    turn,
                    token_ids=absent_tokens(size),
                    behavior_logprobs=absent_logprobs(size),
                    version_spans=spans,
                )
                for turn, size, spans in parted
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
        _split_values(token_ids, sizes),
        _split_values(logprobs, sizes),
        _split_values(context, [turn.context.size for turn in rollout.turns]),
        strict=True,
    )
    return replace(
        rollout,
        turns=tuple(
            replace(turn, token_ids=tokens, behavior_logprobs=turn_logprobs, context=turn_context)
            for turn, tokens, turn_logprobs, turn_context in parted
        ),
    )


def _turn_to_proto(turn: Turn) -> common.Turn:
    return common.Turn(
        parent=turn.parent,
        is_new_root=turn.is_new_root,
        num_tokens=turn.token_ids.size,
        num_context_tokens=turn.context.size,
        finish_reason=finish_reason_to_proto(turn.finish_reason),
        reward=turn.reward,
    )


def _turn_from_proto(message: common.Turn, name: str) -> Turn:
    """Decode a turn whose tokens are absent."""
    parent = message.parent if message.HasField("parent") else None
    context = absent_tokens(message.num_context_tokens)
    if message.is_new_root and (parent is not None or not context.size):
        wrong = "it continues another" if parent is not None else "it has read nothing"
        raise InvalidRequestError(f"{name}: is_new_root, but {wrong}")
    reward = message.reward if message.HasField("reward") else None
    if reward is not None and not abs(reward) <= LARGEST_NUMBER:
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


def _split_values(values: _Values, sizes: Sequence[int]) -> Iterator[_Values]:
    for start, end in pairwise(accumulate(sizes, initial=0)):
        yield values[start:end]


def _split_spans(
    spans: Sequence[VersionSpan], sizes: Sequence[int]
) -> Iterator[tuple[VersionSpan, ...]]:
    """Cut spans of all tokens where turns end."""
    for start, end in pairwise(accumulate(sizes, initial=0)):
        yield tuple(
            VersionSpan(span.version, max(span.start, start) - start, min(span.end, end) - start)
            for span in spans
            if span.start < end and span.end > start
        )
