"""Digests of weights: what lets two processes prove that they hold the same model.

A tensor's digest is blake2b-128 over its name, dtype and shape, then the check sums
(`sluice.weights.block_sums`) of its bytes in row-major order. The digest of all weights is
blake2b-128 over the (name, digest) pairs sorted by name, so it does not depend on the order of the
wire. Both are independent of where the tensors live. They prove that nothing was lost, mixed up or
damaged; they are no signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sluice.types import TensorSpec
from sluice.weights.block_sums import BlockSums
from sluice.weights.plan import Bucket, TransferPlan

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 16


class StreamDigest:
    """Takes the digest of all weights from buckets as they pass.

    Each bucket is absorbed once; summing one while the next is on the wire hides most of its cost.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._sums = [BlockSums(size) for size in plan.sizes]

    def absorb(self, bucket: Bucket, content: torch.Tensor) -> None:
        """Take in one bucket: `content` is uint8 ``[bucket.num_bytes]`` on the CPU."""
        received = content.numpy()
        for piece in bucket.pieces:
            end = piece.bucket_start + piece.num_bytes
            self._sums[piece.tensor].add(piece.tensor_start, received[piece.bucket_start : end])

    def hexdigest(self) -> str:
        """The digest of all weights; meaningful once every bucket was absorbed."""
        return _combine(
            {
                spec.name: _tensor_digest(spec, sums)
                for spec, sums in zip(self._plan.tensors, self._sums, strict=True)
            }
        )


def _combine(digests: Mapping[str, bytes]) -> str:
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(digests):
        encoded = name.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded + digests[name])
    return hasher.hexdigest()


def _tensor_digest(spec: TensorSpec, sums: BlockSums) -> bytes:
    header = json.dumps([spec.name, spec.dtype, list(spec.shape)], separators=(",", ":")).encode()
    content = len(header).to_bytes(8, "little") + header + sums.tobytes()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
