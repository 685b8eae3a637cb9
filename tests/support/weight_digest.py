"""The digest of weights, computed a second time and in the plainest way: the definition."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch

_BLOCK = 4096


def plain_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """blake2b-128 over (name, blake2b-128 of header and sums), sorted by name; lengths as u64."""
    combined = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        header = json.dumps([name, dtype, list(tensor.shape)], separators=(",", ":")).encode()
        content = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        one = hashlib.blake2b(_sized(header) + _sums(content), digest_size=16)
        combined.update(_sized(name.encode()) + one.digest())
    return combined.hexdigest()


def _sums(content: bytes) -> bytes:
    """Of each block of 4096 words: the sum of w x; then of each: that of v times x's upper half."""
    padded = content + bytes(-len(content) % (8 * _BLOCK))
    words = np.frombuffer(padded, dtype="<u8").reshape(-1, _BLOCK)
    first = (words * (np.array(_splitmix64(1), dtype=np.uint64) | np.uint64(1))).sum(axis=1)
    second = ((words // 2**32) * np.array(_splitmix64(2), dtype=np.uint64)).sum(axis=1)
    return np.concatenate([first, second]).astype("<u8").tobytes()


def _splitmix64(state: int) -> Sequence[int]:
    """The first numbers of the generator, in Python's integers."""
    numbers = []
    for _ in range(_BLOCK):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        numbers.append(mixed ^ (mixed >> 31))
    return numbers


def _sized(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text
