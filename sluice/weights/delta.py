"""The change of one bucket, bit-exact: which elements differ from those before, and what they are.

The stretches of a bucket with elements of one size are cut into blocks of `BLOCK_ELEMENTS`, so that
memory beside the code itself is small. A block is a header, then its gaps (`gap_code`), its steps
(`step_code`) and the values that are no small steps. A block that would become longer than its
plain bytes holds these, so a code is never much longer than its bucket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sluice.weights.dtypes import torch_dtype
from sluice.weights.gap_code import decode_gaps, encode_gaps
from sluice.weights.plan import Bucket, TransferPlan
from sluice.weights.step_code import Bits, decode_steps, encode_steps

BLOCK_ELEMENTS = 1 << 18

ByteArray: TypeAlias = NDArray[np.uint8]


class _Form(IntEnum):
    """How a block is written; the number is that of a gap's bytes."""

    PLAIN = 0
    NARROW_GAPS = 1
    WIDE_GAPS = 2


# Form; number of changed elements, of gap words, of values given whole.
_HEADER = struct.Struct("<B3xIII")


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes ``[start, stop)`` of a bucket that hold elements of `dtype` (unsigned, little-endian).

    Padding between tensors counts as elements that never change.
    """

    start: int
    stop: int
    dtype: np.dtype[np.unsignedinteger[Any]]

    def of(self, content: ByteArray) -> Bits:
        """A view of the block's elements in the bucket's bytes."""
        return content[self.start : self.stop].view(self.dtype)


def max_code_bytes(plan: TransferPlan, bucket: Bucket) -> int:
    """What the longest code of a change of this bucket takes."""
    return sum(_HEADER.size + block.stop - block.start for block in _blocks(plan, bucket))


def encode_change(plan: TransferPlan, bucket: Bucket, old: ByteArray, new: ByteArray) -> ByteArray:
    """The code from which, with `old`, `apply_change` makes `new`.

    Args:
        old: uint8 ``[bucket.num_bytes]``, aligned to 16 bytes.
        new: the same.
    """
    parts: list[ByteArray] = []
    for block in _blocks(plan, bucket):
        parts.extend(_encode(block.of(old), block.of(new)))
    return np.concatenate(parts)


def apply_change(plan: TransferPlan, bucket: Bucket, code: ByteArray, content: ByteArray) -> int:
    """Change `content`, which holds the old bytes, into the new ones; the elements changed.

    Raises:
        ValueError: this is no code of a change of this bucket. Nothing outside `content` was
            written, but what it holds then is neither the old nor the new.
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
    """Start, stop and size of an element in bytes, for neighbours whose elements have one size."""
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
    """Bytes of the code that belong to this block, and the elements changed."""
    form, changed, num_gaps, num_whole = _HEADER.unpack(code[: _HEADER.size].tobytes())
    if form not in _Form.__members__.values():
        raise ValueError(f"a block's header says form {form}")
    is_plain = form == _Form.PLAIN
    gap_bytes = form * num_gaps
    step_bytes = elements.nbytes if is_plain else changed
    length = _HEADER.size + gap_bytes + step_bytes + num_whole * elements.itemsize
    if max(changed, num_whole) > elements.size or length > min(
        code.size, _HEADER.size + elements.nbytes
    ):
        raise ValueError(f"a block's header says {length} bytes, {code.size} are left")
    if is_plain:
        if (changed, num_gaps, num_whole) != (elements.size, 0, 0):
            raise ValueError(f"a plain block's header says {changed} of {elements.size} elements")
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
