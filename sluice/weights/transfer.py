"""The loop that both ends run: header, buckets and trailer, the same collectives in the same
order.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sluice.concurrency.deadlines import advance
from sluice.weights.backend import Work
from sluice.weights.digest import DIGEST_BYTES, StreamDigest, WeightDigests
from sluice.weights.group import TransferGroup
from sluice.weights.plan import Bucket, TransferPlan, WeightBuffer

_HEADER_MAGIC = b"sluice-u"
_KEEP, _SPARSE = 1, 2
_HEADER_FORMAT = struct.Struct(f"<8sB7xqq{DIGEST_BYTES}s")
_HEADER_CHECK_BYTES = 16


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
        fixed = _HEADER_FORMAT.pack(
            _HEADER_MAGIC, flags, self.version, base.version, bytes.fromhex(base.digest)
        )
        body = fixed + np.array(self.sizes, dtype="<u8").tobytes()
        return torch.frombuffer(bytearray(body + _header_check(body)), dtype=torch.uint8)

    @classmethod
    def decode(cls, content: torch.Tensor) -> UpdateHeader:
        """Read it back.

        Raises:
            ValueError: these bytes are no header, or a damaged one.
        """
        received = content.numpy().tobytes()
        body, check = received[:-_HEADER_CHECK_BYTES], received[-_HEADER_CHECK_BYTES:]
        if not body.startswith(_HEADER_MAGIC):
            raise ValueError(
                f"the header starts with {body[: len(_HEADER_MAGIC)]!r}, not {_HEADER_MAGIC!r}"
            )
        if check != _header_check(body):
            raise ValueError("the header's check sum is wrong")
        _, flags, version, base_version, digest = _HEADER_FORMAT.unpack(body[: _HEADER_FORMAT.size])
        return cls(
            version=version,
            sizes=tuple(np.frombuffer(body, dtype="<u8", offset=_HEADER_FORMAT.size).tolist()),
            base=Base(base_version, digest.hex()) if flags & _SPARSE else None,
            keep=bool(flags & _KEEP),
        )


def header_bytes(plan: TransferPlan) -> int:
    """How long the header of every version is."""
    return _HEADER_FORMAT.size + 8 * len(plan.buckets) + _HEADER_CHECK_BYTES


def _header_check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_HEADER_CHECK_BYTES).digest()


# The last collective of a version: which version it was, and the digest of each tensor.
#
# Its length depends on the plan alone. It carries its own check sum, so that a trailer which
# arrived damaged is not taken for damaged weights.

_TRAILER_MAGIC = b"sluice-w"
_TRAILER_FORMAT = struct.Struct("<8sqQ")
_TRAILER_CHECK_BYTES = 16


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
        fixed = _TRAILER_FORMAT.pack(_TRAILER_MAGIC, self.version, self.total_bytes)
        body = fixed + b"".join(self.digests)
        return torch.frombuffer(bytearray(body + _trailer_check(body)), dtype=torch.uint8)

    @classmethod
    def decode(cls, content: torch.Tensor) -> Trailer:
        """Read it back.

        Raises:
            ValueError: these bytes are no trailer, or a damaged one.
        """
        received = content.numpy().tobytes()
        body, check = received[:-_TRAILER_CHECK_BYTES], received[-_TRAILER_CHECK_BYTES:]
        if not body.startswith(_TRAILER_MAGIC):
            raise ValueError(
                f"the trailer starts with {body[: len(_TRAILER_MAGIC)]!r}, not {_TRAILER_MAGIC!r}"
            )
        if check != _trailer_check(body):
            raise ValueError("the trailer's check sum is wrong")
        _, version, total_bytes = _TRAILER_FORMAT.unpack(body[: _TRAILER_FORMAT.size])
        starts = range(_TRAILER_FORMAT.size, len(body), DIGEST_BYTES)
        return cls(version, total_bytes, tuple(body[at : at + DIGEST_BYTES] for at in starts))


def trailer_bytes(plan: TransferPlan) -> int:
    """How long the trailer of every version is."""
    return _TRAILER_FORMAT.size + DIGEST_BYTES * len(plan.tensors) + _TRAILER_CHECK_BYTES


def _trailer_check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_TRAILER_CHECK_BYTES).digest()


# The loop both ends run: the same collectives in the same order, two of them in flight.
#
# Rank 0 hashes a bucket as soon as it is under way, the others hash one while the next is on the
# wire, so that digests cost little time of their own. That takes several buckets: what is hashed
# when the last one has arrived is on nobody's wire.

NUM_FRAMING_COLLECTIVES = 2
"""Header and trailer, beside the buckets."""

_IN_FLIGHT = 2


class BucketPort(Protocol):
    """Where the bytes of a bucket come from or go to."""

    def load(self, bucket: Bucket) -> torch.Tensor:
        """What the collective gets: uint8 ``[bucket.num_bytes]`` on the group's device."""
        ...

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes on the CPU.

        Called when they are there: at rank 0 once the collective has begun, elsewhere when it has
        ended.
        """
        ...


class DirectPort:
    """A buffer that lies like the wire, on the device of the wire: nothing is copied."""

    def __init__(self, buffer: WeightBuffer) -> None:
        self._buffer = buffer

    def load(self, bucket: Bucket) -> torch.Tensor:
        """A view."""
        return self._buffer.bucket(bucket)

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """The same view."""
        return wire


class PackingPort:
    """Sends tensors that lie anywhere: each bucket is packed on the device of the wire."""

    def __init__(
        self, plan: TransferPlan, weights: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self._ring = _ring(plan, device)
        self._flat = [
            weights[spec.name].detach().contiguous().view(-1).view(torch.uint8)
            for spec in plan.tensors
        ]

    def load(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's pieces, with zeros between them."""
        wire = self._ring[bucket.index % _IN_FLIGHT][: bucket.num_bytes]
        wire.zero_()
        for piece in bucket.pieces:
            source = self._flat[piece.tensor]
            wire[piece.bucket_start : piece.bucket_start + piece.num_bytes].copy_(
                source[piece.tensor_start : piece.tensor_start + piece.num_bytes]
            )
        return wire

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """What was sent, for the digest."""
        return wire.cpu()


class UnpackingPort:
    """Receives on a device and copies each bucket down into a buffer on the CPU."""

    def __init__(self, buffer: WeightBuffer, device: torch.device) -> None:
        self._buffer = buffer
        self._ring = _ring(buffer.plan, device)

    def load(self, bucket: Bucket) -> torch.Tensor:
        """Device memory to receive into."""
        return self._ring[bucket.index % _IN_FLIGHT][: bucket.num_bytes]

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """Copy it down."""
        return self._buffer.bucket(bucket).copy_(wire)


def send_header(
    group: TransferGroup, header: UpdateHeader, phase: str, should_stop: threading.Event
) -> None:
    """Rank 0's first collective of a version. Runs in the owner thread."""
    wire = header.encode().to(group.device.torch_device)
    group.settle(group.post(wire), phase, "the header", should_stop)


def receive_header(
    group: TransferGroup, plan: TransferPlan, phase: str, should_stop: threading.Event
) -> torch.Tensor:
    """The other ranks' counterpart: uint8 ``[header_bytes(plan)]`` on the CPU."""
    return _receive(group, header_bytes(plan), phase, "the header", should_stop)


def broadcast_buckets(
    group: TransferGroup,
    plan: TransferPlan,
    bucket_port: BucketPort,
    phase: str,
    should_stop: threading.Event,
) -> WeightDigests:
    """Move every bucket; returns the digests of what passed. Runs in the owner thread.

    Raises:
        WeightSyncError: see `TransferGroup.settle`.
    """
    digest = StreamDigest(plan)
    is_source = group.spec.rank == 0
    in_flight: deque[tuple[Bucket, torch.Tensor, Work]] = deque()

    def settle_oldest() -> None:
        bucket, wire, work = in_flight.popleft()
        item = f"bucket {bucket.index + 1} of {len(plan.buckets)}"
        group.settle(work, phase, item, should_stop)
        if not is_source:
            digest.absorb(bucket, bucket_port.unload(bucket, wire))

    for bucket in plan.buckets:
        advance()
        wire = bucket_port.load(bucket)
        in_flight.append((bucket, wire, group.post(wire)))
        if is_source:
            digest.absorb(bucket, bucket_port.unload(bucket, wire))
        if len(in_flight) == _IN_FLIGHT:
            settle_oldest()
    while in_flight:
        settle_oldest()
    return digest.digests()


def send_trailer(
    group: TransferGroup, trailer: Trailer, phase: str, should_stop: threading.Event
) -> None:
    """Rank 0's last collective of a version. Runs in the owner thread."""
    wire = trailer.encode().to(group.device.torch_device)
    group.settle(group.post(wire), phase, "the trailer", should_stop)


def receive_trailer(
    group: TransferGroup, plan: TransferPlan, phase: str, should_stop: threading.Event
) -> torch.Tensor:
    """The other ranks' counterpart: uint8 ``[trailer_bytes(plan)]`` on the CPU."""
    return _receive(group, trailer_bytes(plan), phase, "the trailer", should_stop)


def _receive(
    group: TransferGroup, num_bytes: int, phase: str, item: str, should_stop: threading.Event
) -> torch.Tensor:
    wire = torch.zeros(num_bytes, dtype=torch.uint8, device=group.device.torch_device)
    group.settle(group.post(wire), phase, item, should_stop)
    return wire.cpu()


def _ring(plan: TransferPlan, device: torch.device) -> list[torch.Tensor]:
    longest = max((bucket.num_bytes for bucket in plan.buckets), default=0)
    return [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(_IN_FLIGHT)]
