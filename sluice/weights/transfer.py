"""The loop that both ends run for a version: header, buckets and trailer, with the same collectives
in the same order.

Two buckets are in flight. Rank 0 hashes a bucket once its collective has started; the other ranks
hash one while the next is on the wire. So digests cost little extra time, except for the last
bucket, whose hashing nothing overlaps.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sluice.concurrency.waits import advance
from sluice.weights.backend import Work
from sluice.weights.digest import DIGEST_BYTES, StreamDigest, WeightDigests
from sluice.weights.group import TransferGroup
from sluice.weights.plan import Bucket, PackedShare, TransferPlan, WeightBuffer

_HEADER_MAGIC = b"sluice-u"
_KEEP, _SPARSE = 1, 2  # flags
_HEADER_FORMAT = struct.Struct(f"<8sB7xqq{DIGEST_BYTES}s")
_TRAILER_MAGIC = b"sluice-w"
_TRAILER_FORMAT = struct.Struct("<8sqQ")
_CHECK_BYTES = 16

_NUM_FRAMING_COLLECTIVES = 2  # header and trailer, in addition to the buckets

IN_FLIGHT = 2
"""Buckets on the wire at one time."""


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """A version that both ends hold already; `digest` is hex."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """The first collective of a version: it describes the following ones.

    `sizes` are the lengths in bytes of the collectives, one for each bucket. Without a `base` these
    are the buckets, otherwise the changes since it. `keep` asks receivers to keep the committed
    version as a possible base.
    """

    version: int
    sizes: tuple[int, ...]
    base: BaseVersion | None = None
    keep: bool = False

    def encode(self) -> torch.Tensor:
        """Return uint8 ``[header_bytes(plan)]`` on the CPU."""
        # The header has one length with and without a base, so that receivers can allocate it.
        base = self.base or BaseVersion(0, "00" * DIGEST_BYTES)
        flags = (_KEEP if self.keep else 0) | (_SPARSE if self.base else 0)
        fixed = _HEADER_FORMAT.pack(
            _HEADER_MAGIC, flags, self.version, base.version, bytes.fromhex(base.digest)
        )
        body = fixed + np.array(self.sizes, dtype="<u8").tobytes()
        return _with_checksum(body)

    @classmethod
    def decode(cls, content: torch.Tensor) -> UpdateHeader:
        """Read the bytes of `encode`.

        Raises:
            ValueError: the bytes are no header, or a damaged one.
        """
        body = _check_and_unpack(content, _HEADER_MAGIC, "the header")
        _, flags, version, base_version, digest = _HEADER_FORMAT.unpack(body[: _HEADER_FORMAT.size])
        return cls(
            version=version,
            sizes=tuple(np.frombuffer(body, dtype="<u8", offset=_HEADER_FORMAT.size).tolist()),
            base=BaseVersion(base_version, digest.hex()) if flags & _SPARSE else None,
            keep=bool(flags & _KEEP),
        )


def header_bytes(plan: TransferPlan) -> int:
    """Return the length of every version's header."""
    return _HEADER_FORMAT.size + 8 * len(plan.buckets) + _CHECK_BYTES


@dataclass(frozen=True, slots=True)
class UpdateTrailer:
    """The last collective of a version: it describes what was sent.

    `total_bytes` counts the stream; `digests` holds the digests of the parts, in the order of the
    plan. Its own check sum distinguishes a damaged trailer from damaged weights.
    """

    version: int
    total_bytes: int
    digests: tuple[bytes, ...]

    def encode(self) -> torch.Tensor:
        """Return uint8 ``[trailer_bytes(plan)]`` on the CPU."""
        fixed = _TRAILER_FORMAT.pack(_TRAILER_MAGIC, self.version, self.total_bytes)
        body = fixed + b"".join(self.digests)
        return _with_checksum(body)

    @classmethod
    def decode(cls, content: torch.Tensor) -> UpdateTrailer:
        """Read the bytes of `encode`.

        Raises:
            ValueError: the bytes are no trailer, or a damaged one.
        """
        body = _check_and_unpack(content, _TRAILER_MAGIC, "the trailer")
        _, version, total_bytes = _TRAILER_FORMAT.unpack(body[: _TRAILER_FORMAT.size])
        starts = range(_TRAILER_FORMAT.size, len(body), DIGEST_BYTES)
        return cls(version, total_bytes, tuple(body[at : at + DIGEST_BYTES] for at in starts))


def trailer_bytes(plan: TransferPlan) -> int:
    """Return the length of every version's trailer."""
    return _TRAILER_FORMAT.size + DIGEST_BYTES * len(plan.tensors) + _CHECK_BYTES


def _with_checksum(body: bytes) -> torch.Tensor:
    """Return the body and its check sum, uint8 on the CPU."""
    return torch.frombuffer(bytearray(body + _checksum(body)), dtype=torch.uint8)


def _check_and_unpack(content: torch.Tensor, magic: bytes, item: str) -> bytes:
    """Return the body given to `_with_checksum`.

    Raises:
        ValueError: another magic, or a wrong check sum.
    """
    received = content.numpy().tobytes()
    body, check = received[:-_CHECK_BYTES], received[-_CHECK_BYTES:]
    if not body.startswith(magic):
        raise ValueError(f"{item} starts with {body[: len(magic)]!r}, not {magic!r}")
    if check != _checksum(body):
        raise ValueError(f"{item}'s check sum is wrong")
    return body


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()


def version_deadline_s(plan: TransferPlan, timeout_s: float) -> float:
    """Return the time limit for all collectives of a version together, seconds.

    Args:
        timeout_s: time limit of each collective.
    """
    return (len(plan.buckets) + _NUM_FRAMING_COLLECTIVES) * timeout_s


class BucketPort(Protocol):
    """The source or destination of buckets' bytes."""

    def load(self, bucket: Bucket) -> torch.Tensor:
        """Return the collective's tensor: uint8 ``[bucket.num_bytes]`` on the group's device."""
        ...

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """Return the bucket's bytes on the CPU.

        Call it on rank 0 after the collective has started, elsewhere after it has ended.
        """
        ...


class DirectPort:
    """A port for a buffer with the layout and the device of the wire: nothing is copied."""

    def __init__(self, buffer: WeightBuffer | PackedShare) -> None:
        self._buffer = buffer

    def load(self, bucket: Bucket) -> torch.Tensor:
        return self._buffer.bucket(bucket)

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        return wire


class DeviceSendingPort:
    """The sender's port for a device: it copies each bucket there from the buffer."""

    def __init__(
        self, buffer: WeightBuffer | PackedShare, plan: TransferPlan, device: torch.device
    ) -> None:
        self._buffer = buffer
        self._ring = _ring(plan, device)

    def load(self, bucket: Bucket) -> torch.Tensor:
        wire = self._ring[bucket.index % IN_FLIGHT][: bucket.num_bytes]
        # The collective starts behind the copy, and neither memory changes until it has ended.
        return wire.copy_(self._buffer.bucket(bucket), non_blocking=True)

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        return self._buffer.bucket(bucket)


class CopyingPort:
    """The receiver's port for a device, or for parts that are not contiguous: it copies each
    bucket."""

    def __init__(
        self, stream: WeightBuffer | PackedShare, plan: TransferPlan, device: torch.device
    ) -> None:
        self._stream = stream
        self._ring = _ring(plan, device)

    def load(self, bucket: Bucket) -> torch.Tensor:
        return self._ring[bucket.index % IN_FLIGHT][: bucket.num_bytes]

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        return self._stream.put(bucket, wire)


def send(
    group: TransferGroup,
    content: torch.Tensor,
    phase: str,
    item: str,
    should_stop: threading.Event,
) -> None:
    """Send a header or a trailer from rank 0. Runs in the owner thread."""
    wire = content.to(group.device.torch_device)
    group.wait_for(group.post(wire), phase, item, should_stop)


def receive(
    group: TransferGroup, num_bytes: int, phase: str, item: str, should_stop: threading.Event
) -> torch.Tensor:
    """Receive what rank 0 sends: uint8 ``[num_bytes]`` on the CPU. Runs in the owner thread."""
    wire = torch.zeros(num_bytes, dtype=torch.uint8, device=group.device.torch_device)
    group.wait_for(group.post(wire), phase, item, should_stop)
    return wire.cpu()


def broadcast_buckets(
    group: TransferGroup,
    plan: TransferPlan,
    bucket_port: BucketPort,
    phase: str,
    should_stop: threading.Event,
) -> WeightDigests:
    """Move every bucket; return the digests of the bytes moved. Runs in the owner thread.

    Raises:
        WeightSyncError: see `TransferGroup.wait_for`.
    """
    digest = StreamDigest(plan)
    is_source = group.spec.rank == 0
    in_flight: deque[tuple[Bucket, torch.Tensor, Work]] = deque()

    def settle_oldest() -> None:
        bucket, wire, work = in_flight.popleft()
        item = f"bucket {bucket.index + 1} of {len(plan.buckets)}"
        group.wait_for(work, phase, item, should_stop)
        if not is_source:  # the bytes have arrived only now
            digest.update(bucket, bucket_port.unload(bucket, wire))

    for bucket in plan.buckets:
        advance()
        wire = bucket_port.load(bucket)
        in_flight.append((bucket, wire, group.post(wire)))
        if is_source:  # its bytes are complete already: hash them while the wire moves them
            digest.update(bucket, bucket_port.unload(bucket, wire))
        if len(in_flight) == IN_FLIGHT:
            settle_oldest()
    while in_flight:
        settle_oldest()
    return digest.digests()


def _ring(plan: TransferPlan, device: torch.device) -> list[torch.Tensor]:
    longest = max((bucket.num_bytes for bucket in plan.buckets), default=0)
    return [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]
