"""Shares of sources: whole groups of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sources import groups_by_share, shares_by_yield

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
