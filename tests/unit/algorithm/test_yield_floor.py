"""When a run gives up, the simulated one as well."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.admission import LastGroups, YieldFloor
from sluice.config.schema.algorithm import FilterGroupsConfig

MANY = st.lists(st.booleans(), max_size=60)


def after(floor: YieldFloor, ends: list[bool]) -> LastGroups:
    last = LastGroups()
    for is_kept in ends:
        last = floor.after(last, is_kept=is_kept)
    return last


@given(MANY, st.integers(1, 20))
def test_the_share_is_of_the_last_groups_only(ends: list[bool], num_groups: int) -> None:
    window = deque(ends, num_groups)
    last = after(YieldFloor(0.5, num_groups), ends)
    assert last.num_groups == len(window)
    assert last.share == (sum(window) / len(window) if window else 1.0)


def test_fewer_groups_than_the_window_say_nothing() -> None:
    floor = YieldFloor(1.0, 3)
    assert not floor.is_hopeless(after(floor, [False, False]))
    assert floor.is_hopeless(after(floor, [False, False, False]))


def test_a_share_that_is_the_floor_is_enough() -> None:
    floor = YieldFloor(0.25, 4)
    assert not floor.is_hopeless(after(floor, [False, False, True, False]))
    assert floor.is_hopeless(after(floor, [True, False, False, False, False]))


def test_a_floor_of_zero_never_gives_up() -> None:
    floor = YieldFloor(0.0, 2)
    assert not floor.is_hopeless(after(floor, [False] * 5))


def test_a_floor_is_by_default_what_the_configuration_has() -> None:
    config = FilterGroupsConfig()
    assert YieldFloor() == YieldFloor(config.min_yield, config.min_yield_groups)


def test_giving_up_says_the_share_both_bounds_and_the_story() -> None:
    floor = YieldFloor(0.5, 4)
    said = str(floor.error(after(floor, [True, False, False, False]), " (a story)"))
    assert "only 25.00% of the last 4 groups" in said
    assert said.index("min_yield = 0.5 (a story)") < said.index("lower min_yield")
    with pytest.raises(type(floor.error(LastGroups())), match="Generated too many"):
        raise floor.error(LastGroups())
