"""Digests of weights: what lets two processes prove that they hold the same model.

A tensor's digest is blake2b-128 over its name, dtype and shape, then its bytes in row-major
order. The digest of all weights is blake2b-128 over the (name, digest) pairs sorted by name, so
it does not depend on the order of the wire. Both are independent of where the tensors live.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sluice.types import TensorSpec
from sluice.weights.plan import Bucket, TransferPlan

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 16


class StreamDigest:
    """Takes the digest of all weights from buckets as they pass.

    Buckets are absorbed in the order of the plan; hashing one while the next is on the wire hides
    most of its cost.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._hashers = [_start(spec) for spec in plan.tensors]

    def absorb(self, bucket: Bucket, content: torch.Tensor) -> None:
        """Take in one bucket: `content` is uint8 ``[bucket.num_bytes]`` on the CPU."""
        view = content.numpy().data
        for piece in bucket.pieces:
            end = piece.bucket_start + piece.num_bytes
            self._hashers[piece.tensor].update(view[piece.bucket_start : end])

    def hexdigest(self) -> str:
        """The digest of all weights; meaningful once every bucket was absorbed."""
        return _combine(
            {
                spec.name: hasher.digest()
                for spec, hasher in zip(self._plan.tensors, self._hashers, strict=True)
            }
        )


def _combine(digests: Mapping[str, bytes]) -> str:
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(digests):
        encoded = name.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded + digests[name])
    return hasher.hexdigest()


def _start(spec: TensorSpec) -> hashlib.blake2b:
    header = json.dumps([spec.name, spec.dtype, list(spec.shape)], separators=(",", ":")).encode()
    return hashlib.blake2b(len(header).to_bytes(8, "little") + header, digest_size=DIGEST_BYTES)
