"""Half of the samples make a group, and of several at least two."""

from __future__ import annotations

import pytest

from sluice.algorithm.groups.filter import min_scored_samples


@pytest.mark.parametrize(
    ("n", "fewest"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (8, 4), (9, 5), (16, 8)]
)
def test_half_of_the_samples_and_of_several_two_make_a_group(n: int, fewest: int) -> None:
    assert min_scored_samples(n, whole_groups=False) == fewest


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_whole_group_misses_none(n: int) -> None:
    assert min_scored_samples(n, whole_groups=True) == n


@pytest.mark.parametrize(
    ("n", "min_share", "fewest"), [(25, 0.56, 14), (25, 0.57, 15), (100, 0.55, 55), (3, 2 / 3, 2)]
)
def test_a_share_asks_for_no_sample_beyond_it(n: int, min_share: float, fewest: int) -> None:
    assert min_scored_samples(n, whole_groups=False, min_share=min_share) == fewest
