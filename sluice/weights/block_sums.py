"""Check sums of a long run of bytes at the speed of memory, taken in any pieces.

The bytes are 64-bit little-endian words x (the last one filled up with zeros) in blocks of
`BLOCK_WORDS`. A block has two sums modulo 2^64: of w[i] x[i], and of v[i] times the upper half of
x[i]; w and v are fixed random numbers, w odd. This is multilinear hashing (Carter and Wegman 1979;
Lemire and Kaser 2014), about ten times as fast as a cryptographic hash. The second sum is there for
the upper bits, which in the first one reach only the bits above them. A change of one word always
changes the first sum; one that leaves both as they were by chance has a probability of 2^-64 or so.
It is proof against faults, not against somebody who looks for such a change.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]

BLOCK_WORDS = 4096
WORD_BYTES = 8
_BLOCKS_AT_ONCE = 8  # what fits into a core's cache beside the upper halves
_UPPER = np.uint64(32)


class BlockSums:
    """The sums of all blocks of `num_bytes` bytes, to which parts are added in any order."""

    def __init__(self, num_bytes: int) -> None:
        num_blocks = -(-num_bytes // (BLOCK_WORDS * WORD_BYTES))
        self._sums = np.zeros((2, num_blocks), dtype=np.uint64)

    def add(self, start: int, content: NDArray[np.uint8]) -> None:
        """Add the bytes from `start` on, a multiple of 8, to which `content` is aligned.

        Only the last part of the run may have a length that is no multiple of 8.
        """
        whole = content.size // WORD_BYTES * WORD_BYTES
        self._add_words(start // WORD_BYTES, content[:whole].view("<u8"))
        if whole < content.size:
            last = np.zeros(WORD_BYTES, dtype=np.uint8)
            last[: content.size - whole] = content[whole:]
            self._add_words((start + whole) // WORD_BYTES, last.view("<u8"))

    def tobytes(self) -> bytes:
        """All sums, little-endian: the first ones of the blocks, then the second ones."""
        return self._sums.astype("<u8").tobytes()

    def _add_words(self, first: int, words: Words) -> None:
        block, place = divmod(first, BLOCK_WORDS)
        head = min(words.size, -place % BLOCK_WORDS)
        if head:
            self._add_rows(block, place, words[None, :head])
            block += 1
        tail = head + (words.size - head) // BLOCK_WORDS * BLOCK_WORDS
        rows = words[head:tail].reshape(-1, BLOCK_WORDS)
        for row in range(0, len(rows), _BLOCKS_AT_ONCE):
            self._add_rows(block + row, 0, rows[row : row + _BLOCKS_AT_ONCE])
        if tail < words.size:
            self._add_rows(block + len(rows), 0, words[None, tail:])

    def _add_rows(self, block: int, place: int, rows: Words) -> None:
        """Add `rows` to as many blocks; each row's first word is at `place` of its block."""
        factors = slice(place, place + rows.shape[1])
        blocks = slice(block, block + rows.shape[0])
        self._sums[0, blocks] += rows @ _WORD_FACTORS[factors]
        self._sums[1, blocks] += (rows >> _UPPER) @ _UPPER_FACTORS[factors]


def random_factors(seed: int) -> Words:
    """`BLOCK_WORDS` numbers of the generator SplitMix64 (Steele et al. 2014) from `seed` on."""
    state = np.uint64(seed) + np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


_WORD_FACTORS = random_factors(1) | np.uint64(1)
_UPPER_FACTORS = random_factors(2)
