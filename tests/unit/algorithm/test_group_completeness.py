"""Half of the samples make a group, and of several at least two."""

from __future__ import annotations

import pytest

from sluice.algorithm.group_completeness import fewest_samples


@pytest.mark.parametrize(
    ("n", "fewest"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (8, 4), (9, 5), (16, 8)]
)
def test_half_of_the_samples_and_of_several_two_make_a_group(n: int, fewest: int) -> None:
    assert fewest_samples(n, whole_groups=False) == fewest


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_whole_group_misses_none(n: int) -> None:
    assert fewest_samples(n, whole_groups=True) == n
