"""Per-token arrays as fixed-width little-endian bytes."""

from __future__ import annotations

import numpy as np

from sluice.errors import InvalidRequestError
from sluice.types import Logprobs, TokenIds

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
