"""An update that carries only the changes since a version that the receivers hold, bit for bit.

Receivers apply it in staging memory, to the base or a copy of it. Its digest covers all parts, as
for a whole update.

The code of a bucket: its stretches of elements of one size are cut into blocks of `BLOCK_ELEMENTS`,
so that the code needs little extra memory. A block is a header, the gaps between changed elements,
their steps, and the values whose step does not fit a byte. A block that would be longer than its
plain bytes holds these instead, so a code is never much longer than its bucket.

Gaps: the gap of a position is the number of places skipped since the one before, in words of one
byte. The word 255 skips that many places and marks none; it is repeated as often as it fits, and
the rest marks a place. If a share p of places is marked, gaps cost at most p + 1/255 bytes a place.

Steps: an optimizer step moves most weights by one unit in the last place or by none, and the bits
of neighbouring floating-point numbers are neighbouring integers. The step from old to new bits,
modulo 2 to the number of bits (1, -1, 2, -2, ... become 1, 0, 3, 2, ...; 0 does not occur), is a
byte if it fits; 255 means that the new bits follow whole. Everything compares bits, not numbers:
NaN equals itself, and -0.0 differs from 0.0.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.errors import InvalidRequestError, WeightSyncError
from sluice.weights.plan import (
    Bucket,
    PackedShare,
    TransferPlan,
    WeightBuffer,
    stream_of,
    torch_dtype,
)
from sluice.weights.transfer import IN_FLIGHT, BaseVersion

WORTHWHILE_SHARE = 0.25
"""Largest share of all bytes. Above it, coding takes longer than a fast network needs for the
difference."""

Positions: TypeAlias = NDArray[np.int64]
Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
ByteArray: TypeAlias = NDArray[np.uint8]
_Elements: TypeAlias = np.dtype[np.unsignedinteger[Any]]

_SKIP = _WHOLE = 255
_PLAIN, _CODED = 0, 1
"""Forms of a block."""

BLOCK_ELEMENTS = 1 << 18

# Form; number of changed elements, of gap words, of values given whole.
_HEADER = struct.Struct("<B3xIII")


def encode_gaps(positions: Positions) -> NDArray[np.uint8]:
    """Return the gaps of positions: uint8 ``[words]``, at least one word per position.

    Args:
        positions: int64 ``[marked]``, ascending, not negative.
    """
    gaps = np.diff(positions, prepend=-1) - 1
    skips, remainders = np.divmod(gaps, _SKIP)
    ends = np.cumsum(skips + 1) - 1
    words = np.full(int(ends[-1]) + 1 if gaps.size else 0, _SKIP, dtype=np.uint8)
    words[ends] = remainders
    return words


def decode_gaps(words: NDArray[np.uint8], num_positions: int, length: int) -> Positions:
    """Return the positions, int64 ``[num_positions]``, ascending and each in ``[0, length)``.

    Raises:
        ValueError: the words do not mark `num_positions` places, or one beyond `length`.
    """
    marks = words != _SKIP
    if (marked := int(np.count_nonzero(marks))) != num_positions:
        raise ValueError(f"the gap code marks {marked} places instead of {num_positions}")
    if words.size and not marks[-1]:
        raise ValueError("the gap code ends in a skip")
    # A word passes as many places as it holds, and a mark takes one more.
    ends = np.cumsum(words + marks.astype(np.int64))
    positions: Positions = ends[marks] - 1
    if num_positions and positions[-1] >= length:
        raise ValueError(f"the gap code marks place {positions[-1]} of {length}")
    return positions


def encode_steps(old: Bits, new: Bits) -> tuple[NDArray[np.uint8], Bits]:
    """Return the steps from `old` to `new`, both ``[changed]``, unsigned, of one width; no element
    is equal.

    Returns:
        uint8 ``[changed]``, and the new bits of elements whose step is 255, in order.
    """
    step = new - old  # wraps around: a step back is more than half of the range
    backwards = step > np.iinfo(step.dtype).max // 2
    size = np.where(backwards, -step, step) - np.array(1, dtype=step.dtype)
    is_far = size > (_WHOLE - 2) // 2
    steps = np.where(is_far, 0, size).astype(np.uint8) * 2 + ~backwards
    steps[is_far] = _WHOLE
    return steps.astype(np.uint8), new[is_far]


def decode_steps(old: Bits, steps: NDArray[np.uint8], values: Bits) -> Bits:
    """Return the new bits.

    Args:
        old: unsigned ``[changed]``.
        steps: uint8 ``[changed]``.
        values: of the dtype of `old`, one for each step of 255.

    Raises:
        ValueError: more or fewer steps are 255 than `values` has.
    """
    is_far = steps == _WHOLE
    if (count := int(np.count_nonzero(is_far))) != values.size:
        raise ValueError(
            f"{count} values are not coded as steps, and {values.size} are given whole"
        )
    size = (steps >> 1).astype(old.dtype) + np.array(1, dtype=old.dtype)
    new = np.where(steps & 1, old + size, old - size)
    new[is_far] = values
    return new


def max_code_bytes(plan: TransferPlan, bucket: Bucket) -> int:
    """Return the size of the longest possible code for this bucket, bytes."""
    return sum(_HEADER.size + block.stop - block.start for block, _ in _blocks(plan, bucket))


def encode_change(plan: TransferPlan, bucket: Bucket, old: ByteArray, new: ByteArray) -> ByteArray:
    """Return the code that `apply_change` needs to turn `old` into `new`.

    Args:
        old: uint8 ``[bucket.num_bytes]``, aligned to 16 bytes.
        new: the same.
    """
    parts: list[ByteArray] = []
    for block, dtype in _blocks(plan, bucket):
        parts.extend(_encode(old[block].view(dtype), new[block].view(dtype)))
    return np.concatenate(parts)


def apply_change(plan: TransferPlan, bucket: Bucket, code: ByteArray, content: ByteArray) -> None:
    """Change `content`, which holds the old bytes, into the new ones.

    Raises:
        ValueError: this is not the code of a change of this bucket. Nothing outside `content` was
            written, but its own bytes are then neither the old nor the new ones.
    """
    remaining = code
    for block, dtype in _blocks(plan, bucket):
        if remaining.size < _HEADER.size:
            raise ValueError("the code ends in front of a block's header")
        remaining = remaining[_apply(remaining, content[block].view(dtype)) :]
    if remaining.size:
        raise ValueError(f"{remaining.size} bytes are left over after the last block")


def _blocks(plan: TransferPlan, bucket: Bucket) -> Iterator[tuple[slice, _Elements]]:
    """Yield where the bucket's bytes hold a block, and its elements' dtype.

    Padding between tensors counts as elements that never change.
    """
    for start, stop, size in _spans_of_one_width(plan, bucket):
        for begin in range(start, stop, BLOCK_ELEMENTS * size):
            end = min(begin + BLOCK_ELEMENTS * size, stop)
            yield slice(begin, end), np.dtype(f"<u{size}")


def _spans_of_one_width(plan: TransferPlan, bucket: Bucket) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and bytes of an element, for neighbours with elements of one size."""
    start = stop = size = 0
    for piece in bucket.pieces:
        itemsize = torch_dtype(plan.tensors[piece.tensor].dtype).itemsize
        if itemsize != size:
            if stop:
                yield start, stop, size
            start, size = piece.bucket_start, itemsize
        stop = piece.bucket_start + piece.num_bytes
    if stop:
        yield start, stop, size


def _encode(old: Bits, new: Bits) -> Iterator[ByteArray]:
    positions = np.flatnonzero(old != new)
    gaps = encode_gaps(positions)
    steps, values = encode_steps(old[positions], new[positions])
    if gaps.nbytes + steps.nbytes + values.nbytes < new.nbytes:
        yield _header(_CODED, positions.size, gaps.size, values.size)
        yield from (gaps, steps, _bytes(values))
    else:
        yield _header(_PLAIN, new.size, 0, 0)
        yield _bytes(new)


def _apply(code: ByteArray, elements: Bits) -> int:
    """Apply the next block; return the length of its code."""
    form, changed, num_gaps, num_whole = _HEADER.unpack(code[: _HEADER.size].tobytes())
    if form not in (_PLAIN, _CODED):
        raise ValueError(f"a block's header has form {form}")
    is_plain = form == _PLAIN
    step_bytes = elements.nbytes if is_plain else changed
    length: int = _HEADER.size + num_gaps + step_bytes + num_whole * elements.itemsize
    if max(changed, num_whole) > elements.size or length > min(
        code.size, _HEADER.size + elements.nbytes
    ):
        raise ValueError(f"a block's header claims {length} bytes, {code.size} are left")
    if is_plain:
        if (changed, num_gaps, num_whole) != (elements.size, 0, 0):
            raise ValueError(f"a plain block's header claims {changed} of {elements.size} elements")
        elements[:] = code[_HEADER.size : length].view(elements.dtype)
        return length
    gaps, steps, values = np.split(code[_HEADER.size : length], [num_gaps, num_gaps + step_bytes])
    positions = decode_gaps(gaps, changed, elements.size)
    elements[positions] = decode_steps(elements[positions], steps, values.view(elements.dtype))
    return length


def _header(form: int, changed: int, num_gaps: int, num_whole: int) -> ByteArray:
    return np.frombuffer(_HEADER.pack(form, changed, num_gaps, num_whole), dtype=np.uint8)


def _bytes(array: NDArray[np.unsignedinteger[Any]]) -> ByteArray:
    return array.view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class SparseUpdate:
    """The changes of each bucket since `base`: uint8 on the CPU, in the order of the plan."""

    base: BaseVersion
    codes: tuple[torch.Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each bucket's changes."""
        return tuple(code.numel() for code in self.codes)


def encode_update(
    plan: TransferPlan,
    base: BaseVersion,
    old: WeightBuffer,
    new: WeightBuffer,
    should_stop: threading.Event,
) -> SparseUpdate | None:
    """Return the changes from `old` to `new`; ``None`` if they are too many, or when asked to stop.

    Memory: the code, which is at most about `WORTHWHILE_SHARE` of the share.

    Args:
        plan: of the wire; both buffers hold its parts.
        base: version and digest of `old`.
        old: the weights that every receiver holds.
        new: the weights that they will hold.
        should_stop: checked between two buckets.
    """
    if old.plan != new.plan or not {*plan.tensors} <= {*new.plan.tensors}:
        raise InvalidRequestError("weights: only buffers of the epoch's tensors can be compared")
    allowed = WORTHWHILE_SHARE * plan.total_bytes
    codes: list[torch.Tensor] = []
    old_stream, new_stream = stream_of(plan, old, 1), stream_of(plan, new, 1)
    for bucket in plan.buckets:
        contents = old_stream.bucket(bucket).numpy(), new_stream.bucket(bucket).numpy()
        code = encode_change(plan, bucket, *contents)
        # Stop once the changes save too little.
        allowed -= code.nbytes
        if allowed < 0 or should_stop.is_set():
            return None
        codes.append(torch.from_numpy(code))
    return SparseUpdate(base, tuple(codes))


class ChangeSendingPort:
    """The sender's port for changes; the digest covers the new weights."""

    def __init__(
        self, update: SparseUpdate, new: WeightBuffer | PackedShare, device: torch.device
    ) -> None:
        self._update = update
        self._new = new
        self._device = device

    def load(self, bucket: Bucket) -> torch.Tensor:
        return self._update.codes[bucket.index].to(self._device)

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        return self._new.bucket(bucket)


class ChangeReceivingPort:
    """The receiver's port for changes, which it applies to the base in staging memory.

    Args:
        base: the same parts of the base; only read, unless it is the staging memory itself.
        sizes: bytes of each bucket's changes.

    Raises:
        ValueError: no changes under this plan have these sizes.
    """

    def __init__(
        self,
        plan: TransferPlan,
        staging: WeightBuffer | PackedShare,
        base: WeightBuffer | PackedShare,
        sizes: Sequence[int],
        device: torch.device,
        sender: str,
        phase: str,
    ) -> None:
        for bucket, size in zip(plan.buckets, sizes, strict=True):
            if not 0 < size <= max_code_bytes(plan, bucket):
                raise ValueError(f"bucket {bucket.index + 1} claims changes of {size} bytes")
        self._plan = plan
        self._staging = staging
        self._base = base
        self._sizes = tuple(sizes)
        self._peer = sender, phase
        longest = max(sizes, default=0)
        self._ring = [
            torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)
        ]

    def load(self, bucket: Bucket) -> torch.Tensor:
        return self._ring[bucket.index % IN_FLIGHT][: self._sizes[bucket.index]]

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """Apply the changes; return the bucket's new bytes.

        Raises:
            WeightSyncError: the bytes that arrived are not changes of this bucket.
        """
        content = self._base_bucket(bucket)
        try:
            apply_change(self._plan, bucket, wire.cpu().numpy(), content.numpy())
        except ValueError as error:
            item = f"bucket {bucket.index + 1} of {len(self._plan.buckets)}"
            raise WeightSyncError(*self._peer, f"{item}: {error}") from error
        return self._staging.put(bucket, content)

    def _base_bucket(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket of the base, to be written to."""
        if self._base is self._staging or isinstance(self._base, PackedShare):
            return self._base.bucket(bucket)  # packed: a copy that nothing else reads
        return self._staging.bucket(bucket).copy_(self._base.bucket(bucket))
