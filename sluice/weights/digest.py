"""Digests of weights: with them two processes prove that they hold the same model.

A tensor's digest is XXH3-128 (the xxHash project's, seed 0, canonical big-endian bytes) over a
header (name, dtype and shape as compact JSON, behind its length as a u64) and the tensor's bytes in
row-major order. The digest of all weights is blake2b-128 over the (name, digest) pairs sorted by
name, so it does not depend on the order of the wire. Both are independent of where the tensors
live. XXH3 is faster than memory can be read and proof against faults: lost, mixed up or damaged
bytes. It is not a signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import xxhash

from sluice.types import TensorSpec
from sluice.weights.plan import Bucket, TransferPlan

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 16


@dataclass(frozen=True)
class WeightDigests:
    """The digest of each tensor, `DIGEST_BYTES` long, in the order of `specs`."""

    specs: tuple[TensorSpec, ...]
    tensors: tuple[bytes, ...]

    @cached_property
    def combined(self) -> str:
        """Return the hex digest of all weights."""
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        named = zip((spec.name.encode() for spec in self.specs), self.tensors, strict=True)
        for name, digest in sorted(named):  # the order of the wire must not matter
            hasher.update(len(name).to_bytes(8, "little") + name + digest)
        return hasher.hexdigest()

    def differing(self, others: Sequence[bytes]) -> list[str]:
        """Return the names of tensors whose digest differs in `others`, in the order of `specs`."""
        return [
            spec.name
            for spec, ours, other in zip(self.specs, self.tensors, others, strict=True)
            if ours != other
        ]


class StreamDigest:
    """The digests of all tensors, computed from buckets as they pass.

    Each bucket is absorbed once, in the order of the plan. Hashing one while the next is on the
    wire hides the cost.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._specs = plan.tensors
        self._hashers = [xxhash.xxh3_128(_header(spec)) for spec in plan.tensors]

    def absorb(self, bucket: Bucket, content: torch.Tensor) -> None:
        """Hash one bucket; `content` is uint8 ``[bucket.num_bytes]`` on the CPU."""
        received = content.numpy().data
        for piece in bucket.pieces:
            end = piece.bucket_start + piece.num_bytes
            self._hashers[piece.tensor].update(received[piece.bucket_start : end])

    def digests(self) -> WeightDigests:
        """Return the digests; they are complete once every bucket was absorbed."""
        return WeightDigests(self._specs, tuple(hasher.digest() for hasher in self._hashers))


def _header(spec: TensorSpec) -> bytes:
    text = json.dumps([spec.name, spec.dtype, list(spec.shape)], separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text
