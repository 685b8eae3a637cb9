"""Fewer points of a curve: no peak is lost, and no gap."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.dashboard.curves import bucket_edges, bucket_sums, choose_points

NUMBERS = st.floats(allow_nan=True, allow_infinity=False, width=32)
CURVES = st.lists(NUMBERS, max_size=300).map(lambda values: np.array(values, dtype=np.float64))


@given(CURVES, st.integers(4, 50))
def test_what_is_kept_is_in_order_and_at_most_what_was_asked_for(
    values: np.ndarray, most: int
) -> None:
    kept = choose_points(values, most)
    assert kept.size <= most
    assert (np.diff(kept) > 0).all()
    assert kept.size == values.size or values.size > most


@given(CURVES, st.integers(4, 50))
def test_first_last_smallest_and_largest_are_kept(values: np.ndarray, most: int) -> None:
    kept = choose_points(values, most)
    if not values.size:
        return
    assert kept[0] == 0
    assert kept[-1] == values.size - 1
    if not np.isnan(values).all():
        assert np.nanmin(values[kept]) == np.nanmin(values)
        assert np.nanmax(values[kept]) == np.nanmax(values)


@given(CURVES, st.integers(4, 50))
def test_each_stretch_keeps_its_own_smallest_and_largest(values: np.ndarray, most: int) -> None:
    kept = choose_points(values, most)
    if values.size <= most:
        return
    edges = bucket_edges(values.size - 2, (most - 2) // 2) + 1
    for begin, end in pairwise(edges):
        inside = values[kept[(kept >= begin) & (kept < end)]]
        assert inside.size  # a gap keeps a point as well
        stretch = values[begin:end]
        if not np.isnan(stretch).all():
            assert np.nanmin(inside) == np.nanmin(stretch)
            assert np.nanmax(inside) == np.nanmax(stretch)


@given(st.integers(0, 500), st.integers(1, 60))
def test_stretches_cover_all_points_and_differ_by_one_at_most(num: int, most: int) -> None:
    edges = bucket_edges(num, most)
    sizes = np.diff(edges)
    assert edges[0] == 0
    assert edges[-1] == num
    assert sizes.size <= most
    if num:
        assert sizes.min() >= 1
        assert sizes.max() - sizes.min() <= 1


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.integers(1, 30))
def test_sums_lose_nothing(counts: list[int], most: int) -> None:
    values = np.array(counts, dtype=np.float64)
    values[0] = math.nan
    sums = bucket_sums(values, bucket_edges(values.size, most))
    assert sums.sum() == sum(counts[1:])


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        choose_points(np.zeros(10), 3)
