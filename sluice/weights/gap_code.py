"""Rising positions in few bytes: the gaps between them.

The gap of a position is the number of places skipped since the one before. A gap is written in
words of one or two bytes: as often as it fits in, the largest word, which skips that many places
and marks none; then the rest, which marks a place. With a share p of places marked, words of one
byte cost about p + 1/255 bytes a place at most, words of two bytes 2p.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Positions: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.unsignedinteger[Any]]


def encode_gaps(positions: Positions) -> Words:
    """The gaps of `positions` in words of the width that takes fewer bytes.

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
    """The positions back, int64 ``[num_positions]``, rising and each in ``[0, length)``.

    Raises:
        ValueError: the words do not mark `num_positions` places, or one beyond `length`.
    """
    skip = np.iinfo(words.dtype).max
    marks = words != skip
    if (marked := int(np.count_nonzero(marks))) != num_positions:
        raise ValueError(f"the gap code marks {marked} places instead of {num_positions}")
    if words.size and not marks[-1]:
        raise ValueError("the gap code ends in a skip")
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
