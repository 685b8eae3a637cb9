"""When a run gives up, the simulated one as well."""

from __future__ import annotations

from sluice.algorithm.sampling.admission import YieldFloor
from sluice.config.schema.algorithm import FilterGroupsConfig


def test_fewer_groups_than_the_window_say_nothing() -> None:
    floor = YieldFloor(1.0, 3)
    assert not floor.is_hopeless(0, 2)
    assert floor.is_hopeless(0, 3)


def test_a_share_that_is_the_floor_is_enough() -> None:
    floor = YieldFloor(0.25, 4)
    assert not floor.is_hopeless(1, 4)
    assert floor.is_hopeless(0, 4)


def test_a_floor_of_zero_never_gives_up() -> None:
    assert not YieldFloor(0.0, 2).is_hopeless(0, 2)


def test_a_floor_is_by_default_what_the_configuration_has() -> None:
    config = FilterGroupsConfig()
    assert YieldFloor() == YieldFloor(config.min_yield, config.min_yield_groups)


def test_giving_up_says_the_share_both_bounds_and_the_story() -> None:
    said = str(YieldFloor(0.5, 4).error(1, " (a story)"))
    assert "Generated too many" in said
    assert "only 25.00% of the last 4 groups" in said
    assert said.index("min_yield = 0.5 (a story)") < said.index("lower min_yield")
