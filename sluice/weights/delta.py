"""The change of one bucket of weights in few bytes, bit for bit.

A bucket's stretches of elements of one size are cut into blocks of `BLOCK_ELEMENTS`, so that the
code needs little extra memory. A block is a header, the gaps between changed elements, their steps,
and the values whose step does not fit a byte. A block that would be longer than its plain bytes
holds these instead, so a code is never much longer than its bucket.

Gaps: the gap of a position is the number of places skipped since the one before, in words of one or
two bytes. The largest word skips that many places and marks none; it is repeated as often as it
fits, and the rest marks a place. If a share p of places is marked, words of one byte cost at most
about p + 1/255 bytes a place, words of two bytes 2p.

Steps: an optimizer step moves most weights by one unit in the last place or by none, and the bits
of neighbouring floating-point numbers are neighbouring integers. The step from old to new bits,
modulo 2 to the number of bits (1, -1, 2, -2, ... become 1, 0, 3, 2, ...; 0 does not occur), is a
byte if it fits; 255 means that the new bits follow whole. Everything compares bits, not numbers:
NaN equals itself, and -0.0 differs from 0.0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.weights.plan import Bucket, TransferPlan, torch_dtype

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Positions: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.unsignedinteger[Any]]

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]

_WHOLE = 255

BLOCK_ELEMENTS = 1 << 18

ByteArray: TypeAlias = NDArray[np.uint8]

# Form; number of changed elements, of gap words, of values given whole.
_HEADER = struct.Struct("<B3xIII")


def changed_positions(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[changed]``, rising positions in the flattened tensors where bits differ.

    Args:
        old: contiguous, any shape, any dtype of at most 8 bytes.
        new: the same.
    """
    bits = _BITS[new.element_size()]
    return (old.view(-1).view(bits) != new.view(-1).view(bits)).nonzero().view(-1)


def encode_gaps(positions: Positions) -> Words:
    """Return the gaps of `positions` in words of the width that takes fewer bytes.

    Args:
        positions: int64 ``[marked]``, rising, none below 0.

    Returns:
        uint8 or uint16 ``[words]``, at least one word a position.
    """
    gaps = np.diff(positions, prepend=-1) - 1
    narrow_bytes = gaps.size + int((gaps // 0xFF).sum())
    wide_bytes = 2 * (gaps.size + int((gaps // 0xFFFF).sum()))
    return _words(gaps, np.uint8) if narrow_bytes <= wide_bytes else _words(gaps, np.uint16)


def decode_gaps(words: Words, num_positions: int, length: int) -> Positions:
    """Return the positions, int64 ``[num_positions]``, rising and each in ``[0, length)``.

    Raises:
        ValueError: the words do not mark `num_positions` places, or one beyond `length`.
    """
    skip = np.iinfo(words.dtype).max
    marks = words != skip
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


def _words(gaps: Positions, width: type[np.uint8 | np.uint16]) -> Words:
    skip = np.iinfo(width).max
    skips, rest = np.divmod(gaps, skip)
    last = np.cumsum(skips + 1) - 1
    words = np.full(int(last[-1]) + 1 if gaps.size else 0, skip, dtype=width)
    words[last] = rest
    return words


def encode_steps(old: Bits, new: Bits) -> tuple[NDArray[np.uint8], Bits]:
    """Return the steps from `old` to `new`, unsigned of one width, ``[changed]``, nowhere equal.

    Returns:
        uint8 ``[changed]``, and the new bits of those whose step is 255, in their order.
    """
    step = new - old  # wraps around: a step back is more than half of the range
    backwards = step > np.iinfo(step.dtype).max // 2
    size = np.where(backwards, -step, step) - np.array(1, dtype=step.dtype)
    far = size > (_WHOLE - 2) // 2
    steps = np.where(far, 0, size).astype(np.uint8) * 2 + ~backwards
    steps[far] = _WHOLE
    return steps.astype(np.uint8), new[far]


def decode_steps(old: Bits, steps: NDArray[np.uint8], whole: Bits) -> Bits:
    """Return the new bits.

    Args:
        old: unsigned ``[changed]``.
        steps: uint8 ``[changed]``.
        whole: of the dtype of `old`, one for each step of 255.

    Raises:
        ValueError: more or fewer steps are 255 than `whole` has.
    """
    far = steps == _WHOLE
    if (count := int(np.count_nonzero(far))) != whole.size:
        raise ValueError(f"{count} values are not coded as steps, and {whole.size} are given whole")
    size = (steps >> 1).astype(old.dtype) + np.array(1, dtype=old.dtype)
    new = np.where(steps & 1, old + size, old - size)
    new[far] = whole
    return new


class _Form(IntEnum):
    """How a block is written; the value is the number of bytes of a gap word."""

    PLAIN = 0
    NARROW_GAPS = 1
    WIDE_GAPS = 2


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes ``[start, stop)`` of a bucket that hold elements of `dtype` (unsigned, little-endian).

    Padding between tensors counts as elements that never change.
    """

    start: int
    stop: int
    dtype: np.dtype[np.unsignedinteger[Any]]

    def of(self, content: ByteArray) -> Bits:
        """Return a view of the block's elements in the bucket's bytes."""
        return content[self.start : self.stop].view(self.dtype)


def max_code_bytes(plan: TransferPlan, bucket: Bucket) -> int:
    """Return the bytes that the longest code of a change of this bucket takes."""
    return sum(_HEADER.size + block.stop - block.start for block in _blocks(plan, bucket))


def encode_change(plan: TransferPlan, bucket: Bucket, old: ByteArray, new: ByteArray) -> ByteArray:
    """Return the code that `apply_change` needs to turn `old` into `new`.

    Args:
        old: uint8 ``[bucket.num_bytes]``, aligned to 16 bytes.
        new: the same.
    """
    parts: list[ByteArray] = []
    for block in _blocks(plan, bucket):
        parts.extend(_encode(block.of(old), block.of(new)))
    return np.concatenate(parts)


def apply_change(plan: TransferPlan, bucket: Bucket, code: ByteArray, content: ByteArray) -> int:
    """Change `content`, which holds the old bytes, into the new ones; return the number of elements
    changed.

    Raises:
        ValueError: this is not the code of a change of this bucket. Nothing outside `content` was
            written, but its own bytes are then neither the old nor the new ones.
    """
    rest, changed = code, 0
    for block in _blocks(plan, bucket):
        elements = block.of(content)
        if rest.size < _HEADER.size:
            raise ValueError("the code ends in front of a block's header")
        length, block_changed = _apply(rest, elements)
        rest, changed = rest[length:], changed + block_changed
    if rest.size:
        raise ValueError(f"{rest.size} bytes are left over after the last block")
    return changed


def _blocks(plan: TransferPlan, bucket: Bucket) -> Iterator[_Block]:
    for start, stop, size in _stretches(plan, bucket):
        dtype = np.dtype(f"<u{size}")
        for first in range(start, stop, BLOCK_ELEMENTS * size):
            yield _Block(first, min(first + BLOCK_ELEMENTS * size, stop), dtype)


def _stretches(plan: TransferPlan, bucket: Bucket) -> Iterator[tuple[int, int, int]]:
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
    steps, whole = encode_steps(old[positions], new[positions])
    if gaps.nbytes + steps.nbytes + whole.nbytes < new.nbytes:
        yield _header(_Form(gaps.itemsize), positions.size, gaps.size, whole.size)
        yield from (_bytes(gaps), steps, _bytes(whole))
    else:
        yield _header(_Form.PLAIN, new.size, 0, 0)
        yield _bytes(new)


def _apply(code: ByteArray, elements: Bits) -> tuple[int, int]:
    """Apply the next block; return the length of its code and the elements changed."""
    form, changed, num_gaps, num_whole = _HEADER.unpack(code[: _HEADER.size].tobytes())
    if form not in _Form.__members__.values():
        raise ValueError(f"a block's header has form {form}")
    is_plain = form == _Form.PLAIN
    gap_bytes = form * num_gaps  # see `_Form`
    step_bytes = elements.nbytes if is_plain else changed
    length = _HEADER.size + gap_bytes + step_bytes + num_whole * elements.itemsize
    if max(changed, num_whole) > elements.size or length > min(
        code.size, _HEADER.size + elements.nbytes
    ):
        raise ValueError(f"a block's header claims {length} bytes, {code.size} are left")
    if is_plain:
        if (changed, num_gaps, num_whole) != (elements.size, 0, 0):
            raise ValueError(f"a plain block's header claims {changed} of {elements.size} elements")
        elements[:] = code[_HEADER.size : length].view(elements.dtype)
        return length, changed
    gaps, steps, whole = np.split(code[_HEADER.size : length], [gap_bytes, gap_bytes + step_bytes])
    words = gaps if form == _Form.NARROW_GAPS else gaps.view(np.dtype("<u2"))
    positions = decode_gaps(words, changed, elements.size)
    elements[positions] = decode_steps(elements[positions], steps, whole.view(elements.dtype))
    return length, changed


def _header(form: _Form, changed: int, num_gaps: int, num_whole: int) -> ByteArray:
    return np.frombuffer(_HEADER.pack(form, changed, num_gaps, num_whole), dtype=np.uint8)


def _bytes(array: NDArray[np.unsignedinteger[Any]]) -> ByteArray:
    return array.view(np.uint8)
