"""The last collective of a version: which version it was, and the digest of each tensor.

Its length depends on the plan alone. It carries its own check sum, so that a trailer which arrived
damaged is not taken for damaged weights.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch

from sluice.weights.digest import DIGEST_BYTES
from sluice.weights.plan import TransferPlan

_MAGIC = b"sluice-w"
_FORMAT = struct.Struct("<8sqQ")
_CHECK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Trailer:
    """What the sender says it sent.

    `total_bytes` counts the stream; `digests` are those of the tensors, in the order of the plan.
    """

    version: int
    total_bytes: int
    digests: tuple[bytes, ...]

    def encode(self) -> torch.Tensor:
        """uint8 ``[trailer_bytes(plan)]`` on the CPU."""
        fixed = _FORMAT.pack(_MAGIC, self.version, self.total_bytes)
        body = fixed + b"".join(self.digests)
        return torch.frombuffer(bytearray(body + _check(body)), dtype=torch.uint8)

    @classmethod
    def decode(cls, content: torch.Tensor) -> Trailer:
        """Read it back.

        Raises:
            ValueError: these bytes are no trailer, or a damaged one.
        """
        received = content.numpy().tobytes()
        body, check = received[:-_CHECK_BYTES], received[-_CHECK_BYTES:]
        if not body.startswith(_MAGIC):
            raise ValueError(f"the trailer starts with {body[: len(_MAGIC)]!r}, not {_MAGIC!r}")
        if check != _check(body):
            raise ValueError("the trailer's check sum is wrong")
        _, version, total_bytes = _FORMAT.unpack(body[: _FORMAT.size])
        starts = range(_FORMAT.size, len(body), DIGEST_BYTES)
        return cls(version, total_bytes, tuple(body[at : at + DIGEST_BYTES] for at in starts))


def trailer_bytes(plan: TransferPlan) -> int:
    """How long the trailer of every version is."""
    return _FORMAT.size + DIGEST_BYTES * len(plan.tensors) + _CHECK_BYTES


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
