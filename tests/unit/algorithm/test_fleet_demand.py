"""How many replicas keep the trainer fed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.routing import HEADROOM, MAX_GROWTH, FleetUse, replicas_needed, slots_needed

SLOTS = st.integers(1, 10_000)
SHARE = st.floats(0.0, 1.0)


@given(SLOTS, SHARE, SHARE, st.floats(1e-3, 1e5))
def test_demand_is_the_work_over_the_time_in_which_the_trainer_did_not_wait(
    slots: int, used: float, starved: float, observed_s: float
) -> None:
    use = FleetUse(observed_s, starved * observed_s, used * slots * observed_s)
    found = slots_needed(use, slots)
    assert 0.0 <= found <= MAX_GROWTH * slots
    if starved < 1.0 and HEADROOM * used / (1.0 - starved) < MAX_GROWTH * 0.99:
        assert found == pytest.approx(HEADROOM * used * slots / (1.0 - starved))


@pytest.mark.parametrize(
    ("used", "starved", "wanted"),
    [(0.5, 0.0, 0.5), (1.0, 0.0, 1.0), (1.0, 0.5, 2.0), (0.0, 0.0, 0.0), (1.0, 1.0, 4.0 / 1.1)],
)
def test_a_fleet_that_is_idle_shrinks_and_one_that_starves_the_trainer_grows(
    used: float, starved: float, wanted: float
) -> None:
    use = FleetUse(100.0, 100.0 * starved, 100.0 * used * 64)
    assert slots_needed(use, 64) == pytest.approx(HEADROOM * wanted * 64)


@given(SLOTS, SHARE, SHARE, SHARE)
def test_more_waiting_never_asks_for_less(slots: int, used: float, one: float, two: float) -> None:
    less, more = sorted((one, two))
    found = [slots_needed(FleetUse(1.0, wait, used * slots), slots) for wait in (less, more)]
    assert found[0] <= found[1]


def test_before_anything_was_seen_the_fleet_that_is_there_is_wanted() -> None:
    assert slots_needed(FleetUse(0.0, 0.0, 0.0), 48) == 48.0


@given(st.floats(0.0, 1e6), st.integers(1, 1000), st.integers(1, 100))
def test_the_replicas_wanted_hold_the_slots_and_one_less_does_not(
    slots: float, size: int, count: int
) -> None:
    found = replicas_needed(slots, num_slots=size * count, num_replicas=count)
    assert found >= 1
    assert found * size >= slots * (1 - 1e-6)
    assert found == 1 or (found - 1) * size <= slots


def test_without_a_fleet_one_replica_is_wanted_to_begin_with() -> None:
    assert replicas_needed(0.0, num_slots=0, num_replicas=0) == 1
