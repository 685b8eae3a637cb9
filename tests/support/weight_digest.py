"""The digest of weights, computed a second time and in the plainest way: the definition."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch


def plain_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """blake2b-128 over (name, blake2b-128 of header and bytes), sorted by name; lengths as u64."""
    combined = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        header = json.dumps([name, dtype, list(tensor.shape)], separators=(",", ":")).encode()
        content = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        one = hashlib.blake2b(_sized(header) + content, digest_size=16)
        combined.update(_sized(name.encode()) + one.digest())
    return combined.hexdigest()


def _sized(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text
