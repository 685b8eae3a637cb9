"""Check sums do not depend on how the bytes are cut, and tell of every small damage."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.weights.block_sums import BLOCK_WORDS, WORD_BYTES, BlockSums, random_factors

_BLOCK = BLOCK_WORDS * WORD_BYTES


def _bytes(size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(4).integers(0, 256, size, dtype=np.uint8)


def _sums(content: NDArray[np.uint8], cuts: tuple[int, ...] = ()) -> bytes:
    sums = BlockSums(content.size)
    edges = [0, *cuts, content.size]
    for start, stop in pairwise(edges):
        sums.add(start, content[start:stop])
    return sums.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12 * _BLOCK), st.sets(st.integers(0, 12 * BLOCK_WORDS), max_size=5))
def test_sums_are_the_same_however_the_bytes_are_cut(size: int, words: set[int]) -> None:
    content = _bytes(size)
    cuts = tuple(sorted(word * WORD_BYTES for word in words if word * WORD_BYTES < size))
    assert _sums(content, cuts) == _sums(content)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2 * _BLOCK - 1), st.integers(0, 7)),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
def test_flipped_bits_always_show(flips: list[tuple[int, int]]) -> None:
    content = _bytes(2 * _BLOCK)
    before = _sums(content)
    for place, bit in flips:
        content[place] ^= 1 << bit
    assert _sums(content) != before


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("byte", [3, 7])
def test_the_same_high_bit_flipped_in_two_words_shows(byte: int, bit: int) -> None:
    """Where a sum of products alone would cancel: the sign of two numbers."""
    content = _bytes(_BLOCK)
    before = _sums(content)
    for word in range(1, BLOCK_WORDS, 37):
        damaged = content.copy()
        damaged[byte] ^= 1 << bit
        damaged[word * WORD_BYTES + byte] ^= 1 << bit
        assert _sums(damaged) != before


def test_exchanged_and_moved_words_show() -> None:
    content = _bytes(2 * _BLOCK)
    before = _sums(content)
    words = content.view("<u8").copy()
    words[[3, 9]] = words[[9, 3]]
    assert _sums(words.view(np.uint8)) != before
    assert _sums(np.roll(content, WORD_BYTES)) != before
    assert _sums(np.roll(content, _BLOCK)) != before


def test_the_factors_are_those_of_the_published_generator() -> None:
    """Its first number from 0 on, as other implementations give it."""
    assert int(random_factors(0)[0]) == 0xE220A8397B1DCDAF
