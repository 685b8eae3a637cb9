"""Partitions against verl's, ties included (`verl/utils/seqlen_balancing.py`)."""

from __future__ import annotations

import pytest

from sluice.algorithm.packing import balanced_partition


@pytest.mark.parametrize(
    ("weights", "num_parts", "equal_size", "parts"),
    [
        ([10, 20, 30, 40, 50, 60, 70, 80], 2, True, [{1, 2, 4, 7}, {0, 3, 5, 6}]),
        ([900, 100, 300, 700, 500, 500], 3, True, [{4, 5}, {2, 3}, {0, 1}]),
        ([100, 1, 1, 1, 1, 1, 1, 1], 2, True, [{0, 5, 3, 1}, {7, 6, 4, 2}]),
        ([100, 1, 1, 1, 1, 1, 1, 1], 2, False, [{0}, {1, 2, 3, 4, 5, 6, 7}]),
        ([8, 7, 6, 5, 4], 2, False, [{4, 1, 3}, {0, 2}]),
        ([2, 2, 2], 2, False, [{0, 1}, {2}]),
        ([1, 4, 4, 4], 2, False, [{1, 2}, {0, 3}]),
        ([1, 1, 2, 1], 3, False, [{0, 1}, {2}, {3}]),
        ([3, 3, 3, 3], 2, True, [{0, 3}, {1, 2}]),
    ],
)
def test_partition_equals_verls(
    weights: list[int], num_parts: int, equal_size: bool, parts: list[set[int]]
) -> None:
    found = balanced_partition(weights, num_parts, equal_size=equal_size)
    assert [set(part) for part in found] == parts
