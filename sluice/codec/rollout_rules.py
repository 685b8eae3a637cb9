"""What a request to generate must fulfil before its prompt is looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.codec.field_rules import check_count, check_name, check_range, check_text
from sluice.codec.numbers import MAX_NUMBER
from sluice.errors import InvalidRequestError
from sluice.types import Rollout

__all__ = [
    "MAX_PRIORITY",
    "MAX_ROLE_BYTES",
    "MAX_SAMPLE_INDEX",
    "MAX_STOPS",
    "MAX_STOP_BYTES",
    "MAX_TURNS",
    "check_client_priority",
    "check_generate",
    "check_partials",
    "check_stops",
    "check_turns",
]

MAX_SAMPLE_INDEX = 1023
MAX_TURNS, MAX_ROLE_BYTES = 1024, 64
MAX_LINGER_MS = 60_000
MAX_PARTIAL_INTERVAL_MS = 3_600_000
MAX_PRIORITY = 100
MAX_STOPS, MAX_STOP_BYTES = 16, 128


def check_generate(request: rollout.GenerateRequest, max_n: int) -> None:
    """Names, indexes, turns and times in their ranges. Raises InvalidRequestError."""
    check_name("request_id", request.request_id, may_be_empty=True)
    check_turns("prompt.chat.messages", request.prompt.chat.messages, MAX_TURNS)
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
    check_range("linger_ms", request.linger_ms, 0, MAX_LINGER_MS)
    check_range("partial_interval_ms", request.partial_interval_ms, 0, MAX_PARTIAL_INTERVAL_MS)
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.token_budget and request.token_budget < len(indexes):
        raise InvalidRequestError(
            f"token_budget: {request.token_budget} for {len(indexes)} samples; send at least one "
            "token a sample, or 0 for no bound"
        )
    check_stops("sampling.stop", request.sampling.stop)
    if len(request.partials) > len(indexes):
        raise InvalidRequestError(
            f"partials: {len(request.partials)} given for {len(indexes)} samples; send at most one "
            "a sample"
        )


def check_client_priority(request: rollout.GenerateRequest, most: int) -> None:
    """Raises InvalidRequestError where a client asks for more priority than clients may."""
    if request.priority > most:
        raise InvalidRequestError(
            f"priority: {request.priority}; clients may ask for {most} at most: send that or less, "
            "or raise sluice.limits.max_client_priority"
        )


def check_stops(field: str, stops: Sequence[str]) -> None:
    """Few and short: each is looked for after every token.

    Raises:
        InvalidRequestError: names the field, which is `field` or one in it.
    """
    check_count(field, stops, MAX_STOPS)
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidRequestError(
                f"{field}[{index}]: empty; send 1 to {MAX_STOP_BYTES} bytes, or leave it out"
            )
        check_text(f"{field}[{index}]", stop, MAX_STOP_BYTES)


def check_turns(field: str, turns: Sequence[common.ChatMessage], most: int) -> None:
    """Few turns with short roles: chat templates take longer with each, whatever it says.

    Raises:
        InvalidRequestError: names the field, which is `field` or a role in it.
    """
    check_count(field, turns, most)
    for index, turn in enumerate(turns):
        check_text(f"{field}[{index}].role", turn.role, MAX_ROLE_BYTES)


def check_partials(partials: Sequence[Rollout], longest: int) -> None:
    """Samples that can be continued: at most `longest` tokens, known versions, finite logprobs.

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
