"""Checks of single fields, and per-token arrays as fixed-width little-endian bytes."""

from __future__ import annotations

import math
from collections.abc import Sized

import numpy as np

from sluice.errors import InvalidRequestError
from sluice.types import Logprobs, TokenIds

MAX_NUMBER = 2**53
"""Steps, versions, positions and counters end here, so that a float64 holds every one."""


# What single fields of a request must fulfil; every refusal names field, value and remedy.
#
# Pure functions of values. Each raises InvalidRequestError.


MAX_NAME_BYTES = 128
_SHOWN_CHARACTERS = 60


def shortened(value: object) -> str:
    """A value as error messages and logs may show it: one line, printable, not long."""
    text = value if isinstance(value, str) else repr(value)
    shown = repr(text[:_SHOWN_CHARACTERS]) if isinstance(value, str) else text[:_SHOWN_CHARACTERS]
    return f"{shown}…" if len(text) > _SHOWN_CHARACTERS else shown


def check_name(field: str, value: str, *, may_be_empty: bool = False) -> None:
    """A name that goes into logs and tables: printable, at most 128 bytes."""
    if not value and not may_be_empty:
        raise InvalidRequestError(f"{field}: missing; send 1 to {MAX_NAME_BYTES} bytes")
    check_text(field, value, MAX_NAME_BYTES)
    if not value.isprintable():
        raise InvalidRequestError(
            f"{field}: {shortened(value)} holds characters that cannot be shown; leave them out"
        )


def check_text(field: str, value: str, max_bytes: int) -> None:
    """A text of at most `max_bytes` of UTF-8."""
    # Every character has at least one byte: a long text need not be encoded to be refused.
    size = len(value) if len(value) > max_bytes else len(value.encode())
    if size > max_bytes:
        raise InvalidRequestError(
            f"{field}: {shortened(value)} has {size} bytes or more; send at most {max_bytes}"
        )


def check_range(field: str, value: int, lowest: int, highest: int) -> None:
    """A number in [lowest, highest]."""
    if not lowest <= value <= highest:
        raise InvalidRequestError(f"{field}: {value}; send {lowest} to {highest}")


def check_finite(field: str, value: float, lowest: float = 0.0) -> None:
    """A finite number not below `lowest`."""
    if not math.isfinite(value) or value < lowest:
        raise InvalidRequestError(f"{field}: {value}; send a finite number of at least {lowest:g}")


def check_count(field: str, values: Sized, highest: int) -> None:
    """At most `highest` elements."""
    if len(values) > highest:
        raise InvalidRequestError(f"{field}: {len(values)} given; send at most {highest}")


_WIDTH_BYTES = 4


def _checked(data: bytes, field: str) -> bytes:
    if len(data) % _WIDTH_BYTES:
        raise InvalidRequestError(
            f"{field}: {len(data)} bytes are no whole number of 4-byte values; "
            "send little-endian 32-bit values"
        )
    return data


def token_ids_to_bytes(token_ids: TokenIds) -> bytes:
    """[tokens] uint32 -> 4 bytes a token, little-endian."""
    return np.ascontiguousarray(token_ids, dtype="<u4").tobytes()


def token_ids_from_bytes(data: bytes, field: str) -> TokenIds:
    """Inverse of `token_ids_to_bytes`; the array is read-only."""
    return np.frombuffer(_checked(data, field), dtype="<u4").astype(np.uint32, copy=False)


def logprobs_to_bytes(logprobs: Logprobs) -> bytes:
    """[tokens] float32 -> 4 bytes a value, little-endian."""
    return np.ascontiguousarray(logprobs, dtype="<f4").tobytes()


def logprobs_from_bytes(data: bytes, field: str) -> Logprobs:
    """Inverse of `logprobs_to_bytes`; the array is read-only."""
    return np.frombuffer(_checked(data, field), dtype="<f4").astype(np.float32, copy=False)
