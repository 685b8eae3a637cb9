"""The first collective of a version: whether all bytes follow, or only what changed.

Its length depends on the plan alone, so that receivers know it before they know anything else. It
carries its own check sum: a length that arrived damaged would make the two ends of a collective
disagree, which shows only when the collective's time has passed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch

from sluice.weights.digest import DIGEST_BYTES
from sluice.weights.plan import TransferPlan

_MAGIC = b"sluice-u"
_KEEP, _SPARSE = 1, 2
_FORMAT = struct.Struct(f"<8sB7xqq{DIGEST_BYTES}s")
_CHECK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Base:
    """A version that both ends hold already; `digest` is hex."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """What follows.

    `sizes` are the lengths of the collectives in bytes, one for each bucket. Without a `base` they
    are the buckets themselves, with one the changes since. `keep` asks receivers to hold the
    version once it is committed, since a later one may build on it.
    """

    version: int
    sizes: tuple[int, ...]
    base: Base | None = None
    keep: bool = False

    def encode(self) -> torch.Tensor:
        """uint8 ``[header_bytes(plan)]`` on the CPU."""
        base = self.base or Base(0, "00" * DIGEST_BYTES)
        flags = (_KEEP if self.keep else 0) | (_SPARSE if self.base else 0)
        fixed = _FORMAT.pack(_MAGIC, flags, self.version, base.version, bytes.fromhex(base.digest))
        body = fixed + np.array(self.sizes, dtype="<u8").tobytes()
        return torch.frombuffer(bytearray(body + _check(body)), dtype=torch.uint8)

    @classmethod
    def decode(cls, content: torch.Tensor) -> UpdateHeader:
        """Read it back.

        Raises:
            ValueError: these bytes are no header, or a damaged one.
        """
        received = content.numpy().tobytes()
        body, check = received[:-_CHECK_BYTES], received[-_CHECK_BYTES:]
        if not body.startswith(_MAGIC):
            raise ValueError(f"the header starts with {body[: len(_MAGIC)]!r}, not {_MAGIC!r}")
        if check != _check(body):
            raise ValueError("the header's check sum is wrong")
        _, flags, version, base_version, digest = _FORMAT.unpack(body[: _FORMAT.size])
        return cls(
            version=version,
            sizes=tuple(np.frombuffer(body, dtype="<u8", offset=_FORMAT.size).tolist()),
            base=Base(base_version, digest.hex()) if flags & _SPARSE else None,
            keep=bool(flags & _KEEP),
        )


def header_bytes(plan: TransferPlan) -> int:
    """How long the header of every version is."""
    return _FORMAT.size + 8 * len(plan.buckets) + _CHECK_BYTES


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
