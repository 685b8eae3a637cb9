"""Digests of weights, by which two processes prove that they hold the same model.

The digest of a part of a tensor is XXH3-128 (the xxHash project's, seed 0, canonical big-endian
bytes) over a header (name, dtype and shape of the tensor and the part's cuts, none for a whole
tensor, as compact JSON, behind its length as a u64) and the part's bytes in row-major order. The
digest of a version is blake2b-128 over the (name, digest) pairs of its parts, sorted by name; the
name of a part includes its place, see `sluice.weights.share.part_name`. A part is what one sender
holds of what one worker takes of a tensor. One that several workers of a replica take counts once,
so the digest depends on how a replica and the trainer's ranks divide the weights, and not on the
order of the wire or on where the tensors live. XXH3 is faster than memory can be read and
proof against faults: lost, mixed up or damaged bytes. It is not a signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import xxhash

from sluice.weights.plan import Bucket, TransferPlan, describe_part
from sluice.weights.share import part_name

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 16


def combined_digest(parts: Mapping[str, bytes]) -> str:
    """Return the hex digest of a version from those of its parts, by name."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    named = ((name.encode(), digest) for name, digest in parts.items())
    for name, digest in sorted(named):  # the order of the wire must not matter
        hasher.update(len(name).to_bytes(8, "little") + name + digest)
    return hasher.hexdigest()


@dataclass(frozen=True)
class WeightDigests:
    """The digest of each part, `DIGEST_BYTES` long, in the order of the parts' `names`."""

    names: tuple[str, ...]
    parts: tuple[bytes, ...]

    @property
    def by_name(self) -> dict[str, bytes]:
        """Return the digest of each part."""
        return dict(zip(self.names, self.parts, strict=True))

    @cached_property
    def combined(self) -> str:
        """Return the hex digest of all parts."""
        return combined_digest(self.by_name)

    def differing_names(self, other_digests: Sequence[bytes]) -> list[str]:
        """Return the names of parts whose digest differs in `other_digests`, in their order."""
        return [
            name
            for name, ours, theirs in zip(self.names, self.parts, other_digests, strict=True)
            if ours != theirs
        ]


def part_names(plan: TransferPlan) -> tuple[str, ...]:
    """Return the name of each part of a stream, which includes its place."""
    return tuple(
        part_name(spec.name, cuts) for spec, cuts in zip(plan.tensors, plan.cuts, strict=True)
    )


def join_digests(digests: Sequence[WeightDigests]) -> WeightDigests:
    """Return the digests of the parts of several streams."""
    names = tuple(name for stream in digests for name in stream.names)
    return WeightDigests(names, tuple(part for stream in digests for part in stream.parts))


class StreamDigest:
    """The digests of all parts, computed from buckets as they pass.

    Each bucket is hashed once, in the order of the plan. Hashing one while the next is on the
    wire hides the cost.
    """

    def __init__(self, plan: TransferPlan) -> None:
        parts = tuple(zip(plan.tensors, plan.cuts, strict=True))
        self._names = part_names(plan)
        self._hashers = [xxhash.xxh3_128(_header(describe_part(*part))) for part in parts]

    def update(self, bucket: Bucket, content: torch.Tensor) -> None:
        """Hash one bucket; `content` is uint8 ``[bucket.num_bytes]`` on the CPU."""
        received = content.numpy().data
        for piece in bucket.pieces:
            end = piece.bucket_start + piece.num_bytes
            self._hashers[piece.tensor].update(received[piece.bucket_start : end])

    def digests(self) -> WeightDigests:
        """Return the digests; they are complete once every bucket was hashed."""
        return WeightDigests(self._names, tuple(hasher.digest() for hasher in self._hashers))


def _header(part: list[object]) -> bytes:
    text = json.dumps(part, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text
