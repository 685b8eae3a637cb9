"""Digests of weights: what lets two processes prove that they hold the same model.

A tensor's digest is blake2b-128 over its name, dtype and shape, then its bytes in row-major
order. The digest of all weights is blake2b-128 over the (name, digest) pairs sorted by name, so
it does not depend on the order of the wire. Both are independent of where the tensors live.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

import torch

from sluice.types import TensorSpec
from sluice.weights.dtypes import dtype_name
from sluice.weights.plan import Bucket, TransferPlan

DIGEST_BYTES = 16
_CHUNK_BYTES = 64 * 1024 * 1024


def digest_weights(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The hex digest of all weights; tensors may be of any dtype, on any device."""
    return combine_digests({name: digest_tensor(name, tensor) for name, tensor in named_tensors})


def digest_tensor(name: str, tensor: torch.Tensor) -> bytes:
    """The digest of one tensor (16 bytes). Device tensors are copied in chunks of 64 MiB."""
    hasher = _start(TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape)))
    for chunk in _raw_chunks(tensor):
        hasher.update(chunk.numpy().data)
    return hasher.digest()


def combine_digests(digests: Mapping[str, bytes]) -> str:
    """The hex digest over all weights from the digests of each."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(digests):
        encoded = name.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded + digests[name])
    return hasher.hexdigest()


class StreamDigest:
    """The same digest, taken from buckets as they pass.

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
        return combine_digests(
            {
                spec.name: hasher.digest()
                for spec, hasher in zip(self._plan.tensors, self._hashers, strict=True)
            }
        )


def _start(spec: TensorSpec) -> hashlib.blake2b:
    header = json.dumps([spec.name, spec.dtype, list(spec.shape)], separators=(",", ":")).encode()
    return hashlib.blake2b(len(header).to_bytes(8, "little") + header, digest_size=DIGEST_BYTES)


def _raw_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's bytes as uint8 pieces on the CPU."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES].cpu()
