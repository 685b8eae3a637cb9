"""The digest of weights, computed a second time and in the plainest way: the definition."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
import xxhash


def plain_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """blake2b-128 over (name, XXH3-128 of header and bytes), sorted by name; lengths as u64."""
    combined = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        combined.update(_sized(name.encode()) + plain_tensor_digest(name, weights[name]))
    return combined.hexdigest()


def plain_tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """XXH3-128 over the sized header, then the bytes in row-major order."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    header = json.dumps([name, dtype, list(tensor.shape)], separators=(",", ":")).encode()
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return xxhash.xxh3_128(_sized(header) + content).digest()


def _sized(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text
