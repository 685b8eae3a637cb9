"""The last collective of a version: which version it was, and its digest."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from sluice.weights.digest import DIGEST_BYTES

_MAGIC = b"sluice-w"
_FORMAT = struct.Struct(f"<8sqQ{DIGEST_BYTES}s8x")
TRAILER_BYTES = _FORMAT.size


@dataclass(frozen=True, slots=True)
class Trailer:
    """What the sender says it sent. `digest` is hex; `total_bytes` counts the stream."""

    version: int
    total_bytes: int
    digest: str

    def encode(self) -> torch.Tensor:
        """uint8 ``[TRAILER_BYTES]`` on the CPU."""
        packed = _FORMAT.pack(_MAGIC, self.version, self.total_bytes, bytes.fromhex(self.digest))
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @classmethod
    def decode(cls, content: torch.Tensor) -> Trailer:
        """Read it back.

        Raises:
            ValueError: these bytes are no trailer.
        """
        magic, version, total_bytes, digest = _FORMAT.unpack(content.numpy().tobytes())
        if magic != _MAGIC:
            raise ValueError(f"the trailer starts with {magic!r} instead of {_MAGIC!r}")
        return cls(version=version, total_bytes=total_bytes, digest=digest.hex())
