"""Checks of single fields, and per-token arrays as fixed-width little-endian bytes.

The checks are pure functions. Each raises InvalidRequestError, which names field, value and remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np

from sluice.api.common.v1 import common_pb2 as common
from sluice.errors import InvalidRequestError
from sluice.types import Logprobs, RoutedExperts, TokenIds

MAX_NUMBER = 2**53
"""Limit of steps, versions, positions and counters: a float64 holds each exactly."""
MAX_NAME_BYTES = 128
_SHOWN_CHARACTERS = 60

_WIDTH_BYTES = 4
_EXPERT_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}
_MAX_LAYERS, _MAX_EXPERTS_PER_TOKEN = 1024, 256


def shorten(value: object) -> str:
    """Return a value as errors and logs show it: one line, printable, not long."""
    text = value if isinstance(value, str) else repr(value)
    beginning = (
        repr(text[:_SHOWN_CHARACTERS]) if isinstance(value, str) else text[:_SHOWN_CHARACTERS]
    )
    return f"{beginning}…" if len(text) > _SHOWN_CHARACTERS else beginning


@contextmanager
def valid_unicode(field: str) -> Iterator[None]:
    """Raise InvalidRequestError, which names the field, for a text that a message cannot hold."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{field}: not valid Unicode: {error}") from error


def check_name(field: str, value: str, *, may_be_empty: bool = False) -> None:
    """Check a name for logs and tables: printable, at most 128 bytes."""
    if not value and not may_be_empty:
        raise InvalidRequestError(f"{field}: missing; send 1 to {MAX_NAME_BYTES} bytes")
    check_text(field, value, MAX_NAME_BYTES)
    if not value.isprintable():
        raise InvalidRequestError(
            f"{field}: {shorten(value)} contains unprintable characters; remove them"
        )


def check_text(field: str, value: str, max_bytes: int) -> None:
    """Check for at most `max_bytes` of UTF-8."""
    # Every character takes at least one byte, so a long text is refused without encoding it.
    size = len(value) if len(value) > max_bytes else len(value.encode())
    if size > max_bytes:
        raise InvalidRequestError(
            f"{field}: {shorten(value)} has {size} bytes or more; send at most {max_bytes}"
        )


def check_range(field: str, value: float, lowest: int, highest: int) -> None:
    """Check for a number in [lowest, highest]."""
    if not lowest <= value <= highest:
        raise InvalidRequestError(f"{field}: {value}; send {lowest} to {highest}")


def check_finite(field: str, value: float) -> None:
    """Check for a finite number not below 0."""
    if not math.isfinite(value) or value < 0:
        raise InvalidRequestError(f"{field}: {value}; send a finite number of at least 0")


def check_count(field: str, values: Sized, highest: int) -> None:
    """Check for at most `highest` elements."""
    if len(values) > highest:
        raise InvalidRequestError(f"{field}: {len(values)} given; send at most {highest}")


def _check_width(data: bytes, field: str) -> bytes:
    if len(data) % _WIDTH_BYTES:
        raise InvalidRequestError(
            f"{field}: {len(data)} bytes are not a multiple of 4; send little-endian 32-bit values"
        )
    return data


def token_ids_to_bytes(token_ids: TokenIds) -> bytes:
    """Encode [tokens] uint32 as 4 bytes per token, little-endian."""
    return np.ascontiguousarray(token_ids, dtype="<u4").tobytes()


def token_ids_from_bytes(data: bytes, field: str) -> TokenIds:
    """Decode what `token_ids_to_bytes` encoded; the array is read-only."""
    return np.frombuffer(_check_width(data, field), dtype="<u4").astype(np.uint32, copy=False)


def logprobs_to_bytes(logprobs: Logprobs) -> bytes:
    """Encode [tokens] float32 as 4 bytes per value, little-endian."""
    return np.ascontiguousarray(logprobs, dtype="<f4").tobytes()


def logprobs_from_bytes(data: bytes, field: str) -> Logprobs:
    """Decode what `logprobs_to_bytes` encoded; the array is read-only."""
    return np.frombuffer(_check_width(data, field), dtype="<f4").astype(np.float32, copy=False)


def routing_to_proto(routing: RoutedExperts) -> common.RoutedExperts:
    """Encode experts, [tokens, layers, experts per token]."""
    _, layers, per_token = routing.shape
    width = routing.dtype.itemsize
    return common.RoutedExperts(
        experts=np.ascontiguousarray(routing, dtype=_EXPERT_DTYPES[width]).tobytes(),
        layers=layers,
        experts_per_token=per_token,
        bytes_per_expert=width,
    )


def routing_from_proto(message: common.RoutedExperts, field: str) -> RoutedExperts:
    """Decode what `routing_to_proto` encoded; the array is read-only.

    The model's own numbers are checked by those who know the model.

    Raises:
        InvalidRequestError: a size is out of its range, or the bytes are no whole tokens.
    """
    check_range(f"{field}.layers", message.layers, 1, _MAX_LAYERS)
    check_range(f"{field}.experts_per_token", message.experts_per_token, 1, _MAX_EXPERTS_PER_TOKEN)
    check_range(f"{field}.bytes_per_expert", message.bytes_per_expert, 1, max(_EXPERT_DTYPES))
    dtype, data = _EXPERT_DTYPES[message.bytes_per_expert], message.experts
    shape = (-1, message.layers, message.experts_per_token)
    token_bytes = message.layers * message.experts_per_token * dtype.itemsize
    if not data or len(data) % token_bytes:
        raise InvalidRequestError(
            f"{field}.experts: {len(data)} bytes are no multiple of {token_bytes} "
            f"({message.layers} layers x {message.experts_per_token} experts x {dtype.itemsize} "
            "bytes); send whole tokens, at least one"
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)
