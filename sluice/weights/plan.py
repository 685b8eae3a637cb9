"""The layout of weights on the wire and in memory: one stream of bytes, cut into buckets, equal on
both ends.

The stream holds the tensors in their given order, of each the part that a share has, packed. Each
starts at a multiple of 64 bytes, with zeros between them. A bucket is one collective: a slice of
the stream. Buckets end between tensors where they can; only a tensor larger than a bucket is split.
Memory with the layout of the stream (`WeightBuffer`) is therefore received without a copy, and sent
without one if the share is what the sender holds. `PackedShare` is for other memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sluice.device.cuda import pin
from sluice.errors import InvalidRequestError
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE, WeightShare
from sluice.weights.share import (
    Cuts,
    cuts_by_name,
    cuts_within,
    is_one_block,
    pack,
    part_shape,
    unpack,
)

_WIRE_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)

ALIGNMENT_BYTES = 64
"""Where tensors start. Models compute from memory with the layout of the stream, and the speed and
last bits of a matrix product may depend on where its operands lie in a cache line."""

MIN_BUCKET_BYTES = 4096

_WANTED_BUCKETS = 4
MAX_HIDING_BUCKETS = 2 * _WANTED_BUCKETS + 1
"""Buckets of `hiding_bucket_bytes`, below the largest allowed, that a share takes at most: two
neighbors together are larger than one may be."""
_WORTHWHILE_BUCKET_BYTES = 4 << 20

_FRAMING = (
    "store over gRPC; header, buckets, trailer; gaps of a byte; XXH3-128 of each tensor; "
    "samples with the text that they continue"
)
"""Part of the plan's digest: two ends that would disagree on it do not begin.

It also names what samples hold, since nothing else refuses a replica of another version. Change it
with the meaning of either.
"""


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


_BY_NAME = {dtype_name(dtype): dtype for dtype in _WIRE_DTYPES}


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype with that name.

    Raises:
        InvalidRequestError: the name is unknown or the dtype cannot be sent.
    """
    if name not in _BY_NAME:
        raise InvalidRequestError(
            f'dtype "{name}" does not travel on the weight wire; use one of '
            f"{', '.join(sorted(_BY_NAME))}"
        )
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """Bytes ``[tensor_start, tensor_start + num_bytes)`` of one tensor inside one bucket.

    `tensor` indexes the plan's tensors; `bucket_start` is the offset in the bucket.
    """

    tensor: int
    tensor_start: int
    bucket_start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bytes ``[start, stop)`` of the stream, sent by one collective."""

    index: int
    start: int
    stop: int
    pieces: tuple[BucketSlice, ...]

    @property
    def num_bytes(self) -> int:
        """Return the length of the collective in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class TransferPlan:
    """The layout that both ends agree on. It depends only on its arguments.

    `tensors` describes whole tensors; `cuts` and `shapes` describe their parts in the stream.
    `offsets` and `sizes` are in bytes of the stream, one per tensor; `total_bytes` is the stream's
    length, padding included.
    """

    tensors: tuple[TensorSpec, ...]
    cuts: tuple[Cuts, ...]
    shapes: tuple[tuple[int, ...], ...]
    bucket_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total_bytes: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def digest(self) -> str:
        """Return hex blake2b-128 over names, dtypes, shapes, cuts, buckets and framing."""
        layout = {
            "framing": _FRAMING,
            "tensors": [
                describe_part(spec, cuts)
                for spec, cuts in zip(self.tensors, self.cuts, strict=True)
            ],
            "buckets": [[bucket.start, bucket.stop] for bucket in self.buckets],
        }
        encoded = json.dumps(layout, separators=(",", ":")).encode()
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def describe_part(spec: TensorSpec, cuts: Cuts) -> list[object]:
    """Return the description of a part in digests: name, dtype and shape of its tensor, and its
    cuts."""
    tensor: list[object] = [spec.name, spec.dtype, list(spec.shape)]
    return [*tensor, [[cut.dimension, cut.ranges] for cut in cuts]] if cuts else tensor


def tensor_specs(
    named_tensors: Iterable[tuple[str, torch.Tensor]], wire_dtype: torch.dtype | None = None
) -> tuple[TensorSpec, ...]:
    """Describe tensors as they will be sent, in the given order.

    Args:
        named_tensors: the tensors, without tied duplicates.
        wire_dtype: what floating-point tensors are converted to; ``None`` keeps each dtype.
            Other tensors always keep theirs.
    """
    return tuple(
        TensorSpec(
            name=name,
            dtype=dtype_name(
                wire_dtype
                if wire_dtype is not None and tensor.is_floating_point()
                else tensor.dtype
            ),
            shape=tuple(tensor.shape),
        )
        for name, tensor in named_tensors
    )


def hiding_bucket_bytes(
    tensors: Sequence[TensorSpec], max_bytes: int, share: WeightShare = WHOLE
) -> int:
    """Return the bucket size that lets work on one bucket overlap the transfer of the next.

    It is a quarter of the share, so that collectives overlap and little work is left after the last
    bucket, but not so small that the start of collectives costs the saved time.

    Args:
        max_bytes: largest allowed collective; returned for large weights.
    """
    cuts = cuts_by_name(share)
    total = sum(
        _num_bytes(spec, part_shape(spec.shape, cuts.get(spec.name, ()))) for spec in tensors
    )
    return min(max_bytes, max(_align(total // _WANTED_BUCKETS), _WORTHWHILE_BUCKET_BYTES))


def plan_transfer(
    tensors: Sequence[TensorSpec], bucket_bytes: int, share: WeightShare = WHOLE
) -> TransferPlan:
    """Lay tensors out on the wire.

    Args:
        tensors: in the order of the wire; names are unique (tied weights are listed once).
        bucket_bytes: largest collective, a multiple of 64 and at least 4096.
        share: the part of them to send; its cuts were checked before.

    Raises:
        InvalidRequestError: no tensors, a repeated name, an unknown dtype, a negative dimension
            or a bucket size that is not allowed.
    """
    _check(tensors, bucket_bytes)
    by_name = cuts_by_name(share)
    cuts = tuple(by_name.get(spec.name, ()) for spec in tensors)
    shapes = tuple(map(part_shape, (spec.shape for spec in tensors), cuts))
    sizes = tuple(map(_num_bytes, tensors, shapes))
    offsets: list[int] = []
    cursor = 0
    for size in sizes:
        offsets.append(_align(cursor))
        cursor = offsets[-1] + size
    return TransferPlan(
        tensors=tuple(tensors),
        cuts=cuts,
        shapes=shapes,
        bucket_bytes=bucket_bytes,
        offsets=tuple(offsets),
        sizes=sizes,
        total_bytes=cursor,
        buckets=tuple(_buckets(offsets, sizes, bucket_bytes)),
    )


def _check(tensors: Sequence[TensorSpec], bucket_bytes: int) -> None:
    if bucket_bytes < MIN_BUCKET_BYTES or bucket_bytes % ALIGNMENT_BYTES:
        raise InvalidRequestError(
            f"bucket_bytes = {bucket_bytes}: must be a multiple of {ALIGNMENT_BYTES} and at least "
            f"{MIN_BUCKET_BYTES}"
        )
    if not tensors:
        raise InvalidRequestError("tensors: empty; a transfer needs at least one weight")
    names: set[str] = set()
    for spec in tensors:
        if spec.name in names:
            raise InvalidRequestError(
                f"tensors: {spec.name} is listed twice; send tied weights once"
            )
        names.add(spec.name)
        if any(size < 0 for size in spec.shape):
            raise InvalidRequestError(f"tensors: {spec.name} has shape {spec.shape}")


def _num_bytes(spec: TensorSpec, shape: Sequence[int]) -> int:
    return math.prod(shape) * torch_dtype(spec.dtype).itemsize


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _buckets(offsets: Sequence[int], sizes: Sequence[int], bucket_bytes: int) -> Iterator[Bucket]:
    """Cut the stream; cut before a tensor that no longer fits, to keep that tensor whole."""
    index, start = 0, 0
    pieces: list[BucketSlice] = []
    stop = 0
    for tensor, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size == 0:  # an empty tensor has a place in the plan but no bytes
            continue
        done = 0
        if pieces and offset + size - start > bucket_bytes:
            yield Bucket(index, start, offset, tuple(pieces))
            index, start, pieces = index + 1, offset, []
        while done < size:  # more than once only for a tensor larger than a bucket
            length = min(size - done, start + bucket_bytes - offset - done)
            pieces.append(BucketSlice(tensor, done, offset + done - start, length))
            done += length
            stop = offset + done
            if done < size:
                yield Bucket(index, start, stop, tuple(pieces))
                index, start, pieces = index + 1, stop, []
    if pieces:
        yield Bucket(index, start, stop, tuple(pieces))


class WeightBuffer:
    """CPU memory in the layout of a plan's stream.

    `tensors` are views into it, by name and in the order of the plan: packed parts, or the whole
    tensors. A bucket is a slice of it. `beside` is a device that copies from it and to it, a GPU
    directly.
    """

    def __init__(self, plan: TransferPlan, *, beside: torch.device | None = None) -> None:
        self.plan = plan
        # Zeros, so that the padding between tensors is the same in every process.
        self._stream = torch.zeros(plan.total_bytes, dtype=torch.uint8)
        if beside is not None and beside.type == "cuda":
            pin(self._stream, beside)
        self.tensors: Mapping[str, torch.Tensor] = {
            spec.name: self._stream[offset : offset + size]
            .view(torch_dtype(spec.dtype))
            .view(shape)
            for spec, shape, offset, size in zip(
                plan.tensors, plan.shapes, plan.offsets, plan.sizes, strict=True
            )
        }

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's bytes: uint8 ``[bucket.num_bytes]``, a view."""
        return self._stream[bucket.start : bucket.stop]

    def put(self, bucket: Bucket, content: torch.Tensor) -> torch.Tensor:
        """Write the bucket's bytes, unless they are in this memory already; return them, on the
        CPU."""
        target = self.bucket(bucket)
        return target if target.data_ptr() == content.data_ptr() else target.copy_(content)


def stream_of(plan: TransferPlan, weights: WeightBuffer, depth: int) -> WeightBuffer | PackedShare:
    """Return a plan's stream in memory, without a copy if the parts are the same; see
    `PackedShare`."""
    plan_in_memory = weights.plan
    if (plan.tensors, plan.cuts) == (plan_in_memory.tensors, plan_in_memory.cuts):
        return weights
    return PackedShare(plan, weights, depth)


class PackedShare:
    """A stream over larger parts of the same tensors, read and written by buckets.

    Memory: the last `depth` buckets, and one packed part if its tensor is split between buckets or
    its places are apart.

    Args:
        weights: the tensors, whole or parts that contain those of the stream. Nothing may change
            them while they are read.
        depth: how many buckets stay valid while later ones are made.
    """

    def __init__(self, plan: TransferPlan, weights: WeightBuffer, depth: int) -> None:
        self._plan = plan
        self._weights = weights
        outer_cuts = {
            spec.name: cuts
            for spec, cuts in zip(weights.plan.tensors, weights.plan.cuts, strict=True)
        }
        self._cuts = [
            cuts_within(spec.shape, cuts, outer_cuts[spec.name])
            for spec, cuts in zip(plan.tensors, plan.cuts, strict=True)
        ]
        longest = max((bucket.num_bytes for bucket in plan.buckets), default=0)
        self._ring = [torch.empty(longest, dtype=torch.uint8) for _ in range(depth)]
        self._filled_with = [-1] * depth
        self._part: tuple[int, torch.Tensor] | None = None
        self._incoming = torch.empty(0, dtype=torch.uint8)

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's bytes: uint8 ``[bucket.num_bytes]``; see `depth`."""
        place = bucket.index % len(self._ring)
        content = self._ring[place][: bucket.num_bytes]
        if self._filled_with[place] != bucket.index:
            self._fill(bucket, content)
            self._filled_with[place] = bucket.index
        return content

    def put(self, bucket: Bucket, content: torch.Tensor) -> torch.Tensor:
        """Write the bucket's bytes to their places; return them, on the CPU.

        Args:
            bucket: the next bucket in the order of the plan.
            content: uint8 ``[bucket.num_bytes]``.
        """
        content = content.cpu()
        for piece in bucket.pieces:
            start, stop = piece.tensor_start, piece.tensor_start + piece.num_bytes
            weights = self._weights.tensors[self._plan.tensors[piece.tensor].name]
            cuts = self._cuts[piece.tensor]
            source = content[piece.bucket_start : piece.bucket_start + piece.num_bytes]
            if is_one_block(weights.shape, cuts):
                _bytes(pack(weights, cuts))[start:stop].copy_(source)
                continue
            if start == 0:
                self._incoming = torch.empty(self._plan.sizes[piece.tensor], dtype=torch.uint8)
            self._incoming[start:stop].copy_(source)
            if stop == self._incoming.numel():
                shape = self._plan.shapes[piece.tensor]
                unpack(self._incoming.view(weights.dtype).view(shape), cuts, weights)
        return content

    def _fill(self, bucket: Bucket, content: torch.Tensor) -> None:
        end = 0
        for piece in bucket.pieces:
            content[end : piece.bucket_start].zero_()
            part = self._pack_tensor(piece.tensor)
            end = piece.bucket_start + piece.num_bytes
            stop = piece.tensor_start + piece.num_bytes
            content[piece.bucket_start : end].copy_(part[piece.tensor_start : stop])

    def _pack_tensor(self, tensor: int) -> torch.Tensor:
        """Return the bytes of a part."""
        if self._part is None or self._part[0] != tensor:
            part = pack(self._weights.tensors[self._plan.tensors[tensor].name], self._cuts[tensor])
            self._part = tensor, _bytes(part.contiguous())
        return self._part[1]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
