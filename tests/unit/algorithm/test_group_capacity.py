"""Capacity is counted in first requests, and an idle fleet takes any group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.admission import groups_with_capacity

FREE = st.integers(-100, 1000)
FIRST = st.integers(1, 64)


@given(num_free=FREE, first=FIRST, is_idle=st.booleans())
def test_the_first_requests_of_all_but_a_lone_group_fit(
    num_free: int, first: int, is_idle: bool
) -> None:
    capacity = groups_with_capacity(num_free, first_sequences=first, is_idle=is_idle)
    assert capacity >= 0
    assert capacity * first <= max(0, num_free) or (capacity == 1 and is_idle)
    assert (capacity + 1) * first > num_free


@given(num_free=st.integers(1, 1000), first=FIRST)
def test_a_group_larger_than_a_replica_runs_when_nothing_else_does(
    num_free: int, first: int
) -> None:
    assert groups_with_capacity(num_free, first_sequences=first, is_idle=True) >= 1


def test_nothing_starts_where_no_sequence_is_free_or_a_larger_group_runs() -> None:
    assert groups_with_capacity(0, first_sequences=4, is_idle=True) == 0
    assert groups_with_capacity(-3, first_sequences=4, is_idle=True) == 0
    assert groups_with_capacity(3, first_sequences=4, is_idle=False) == 0


def test_probes_leave_capacity_for_more_groups() -> None:
    assert groups_with_capacity(64, first_sequences=16, is_idle=False) == 4
    assert groups_with_capacity(64, first_sequences=4, is_idle=False) == 16
