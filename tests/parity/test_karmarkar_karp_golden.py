"""Partitions against verl's, ties included (`verl/utils/seqlen_balancing.py`)."""

from __future__ import annotations

import pytest

from sluice.algorithm.packing import balanced_partition


@pytest.mark.parametrize(
    ("weights", "num_parts", "parts"),
    [
        ([100, 1, 1, 1, 1, 1, 1, 1], 2, [{0}, {1, 2, 3, 4, 5, 6, 7}]),
        ([8, 7, 6, 5, 4], 2, [{4, 1, 3}, {0, 2}]),
        ([2, 2, 2], 2, [{0, 1}, {2}]),
        ([1, 4, 4, 4], 2, [{1, 2}, {0, 3}]),
        ([1, 1, 2, 1], 3, [{0, 1}, {2}, {3}]),
    ],
)
def test_partition_equals_verls(weights: list[int], num_parts: int, parts: list[set[int]]) -> None:
    found = balanced_partition(weights, num_parts)
    assert [set(part) for part in found] == parts
