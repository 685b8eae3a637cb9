"""Positions survive being written as gaps; damaged gaps are refused, not obeyed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.weights.delta import decode_gaps, encode_gaps


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536])
def test_gaps_at_the_edges_of_a_word_come_back(gap: int) -> None:
    for repeats in (1, 3):
        positions = np.cumsum(np.full(repeats, gap + 1, dtype=np.int64)) - 1
        words = encode_gaps(positions)
        decoded = decode_gaps(words, repeats, int(positions[-1]) + 1)
        np.testing.assert_array_equal(decoded, positions)


@given(st.lists(st.integers(0, 255), max_size=50), st.integers(0, 60), st.integers(0, 4000))
def test_any_words_give_rising_places_inside_or_are_refused(
    words: list[int], count: int, length: int
) -> None:
    try:
        positions = decode_gaps(np.array(words, dtype=np.uint8), count, length)
    except ValueError:
        return
    assert positions.size == count
    assert (np.diff(positions) > 0).all()
    assert all(0 <= position < length for position in positions)


@pytest.mark.parametrize(
    ("words", "count", "said"),
    [
        ([3, 4], 3, "marks 2 places instead of 3"),
        ([3, 255], 1, "ends in a skip"),
        ([3, 250], 2, "marks place 254 of 200"),
    ],
)
def test_words_that_do_not_fit_are_refused_with_the_reason(
    words: list[int], count: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        decode_gaps(np.array(words, dtype=np.uint8), count, 200)
