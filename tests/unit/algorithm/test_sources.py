"""Shares of sources: whole groups of a batch, the next to start, and one order for all."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.strategy import LoopLoad
from sluice.algorithm.sources import (
    SourceLoad,
    groups_by_share,
    interleaved,
    shares_by_yield,
    source_to_start,
)

SHARES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6)


@given(SHARES, st.integers(6, 512))
def test_every_group_of_a_batch_is_of_one_source_and_each_has_one(
    shares: list[float], batch_size: int
) -> None:
    names = {f"s{index}": share for index, share in enumerate(shares)}
    found = groups_by_share(names, batch_size)
    assert sum(found.values()) == batch_size
    assert min(found.values()) >= 1
    for name, share in names.items():
        exact = share / sum(shares) * batch_size
        if all(one / sum(shares) * batch_size >= 1 for one in shares):
            assert abs(found[name] - exact) < 1.0 + 1e-9


def test_sources_by_yield_divide_their_shares_and_others_keep_theirs() -> None:
    shares = {"fixed": 0.5, "solved": 0.25, "mixed": 0.25}
    found = shares_by_yield(shares, {"solved": 0.1, "mixed": 0.4})
    assert found == pytest.approx({"fixed": 0.5, "solved": 0.1, "mixed": 0.4})
    assert shares_by_yield(shares, {}) == shares


def load(num_groups: int, num_to_start: int = 1, *, kept: int = 0, running: int = 0) -> SourceLoad:
    return SourceLoad(LoopLoad(running, kept, 0, 8), num_groups, 0.5, num_to_start)


def test_the_source_furthest_behind_its_share_starts_next() -> None:
    assert source_to_start({"a": load(3, kept=3), "b": load(1, running=1)}) == "b"
    assert source_to_start({"a": load(3, kept=1), "b": load(1, kept=1)}) == "a"
    assert source_to_start({"a": load(3), "b": load(1)}) == "a"


def test_a_source_that_may_not_start_is_passed_over() -> None:
    assert source_to_start({"a": load(3, 0), "b": load(1, 2, kept=9)}) == "b"
    assert source_to_start({"a": load(3, 0), "b": load(1, 0)}) is None


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 4))
def test_every_part_of_the_order_has_the_sources_in_their_shares(
    counts: list[int], num_parts: int
) -> None:
    groups = [[f"{number}-{index:02}" for index in range(n)] for number, n in enumerate(counts)]
    found = interleaved(groups)
    assert Counter(found) == Counter(group for own in groups for group in own)
    for number, own in enumerate(groups):
        assert [one for one in found if one.startswith(f"{number}-")] == own
    size = len(found) // num_parts
    for start in range(0, size * num_parts, max(size, 1)):
        part = found[start : start + size]
        for number, count in enumerate(counts):
            share = count * size / max(len(found), 1)
            assert abs(sum(one.startswith(f"{number}-") for one in part) - share) <= len(counts)
