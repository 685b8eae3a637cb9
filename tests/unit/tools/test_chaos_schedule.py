"""Schedules of faults: repeatable, complete, and never more than a supervisor bears."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.chaos.schedule import FaultKind, draw_schedule

SEEDS = st.integers(0, 2**32)
CHANGES = {FaultKind.JOIN: 1, FaultKind.LEAVE: -1, FaultKind.SCALE_DOWN: -1}


def test_a_schedule_follows_from_its_seed() -> None:
    first = draw_schedule(5, 600.0, interval_s=6.0, replicas=2)
    assert first == draw_schedule(5, 600.0, interval_s=6.0, replicas=2)
    assert first != draw_schedule(6, 600.0, interval_s=6.0, replicas=2)


@given(SEEDS)
@settings(max_examples=30)
def test_ten_minutes_hold_every_kind_of_fault(seed: int) -> None:
    faults = draw_schedule(seed, 540.0, interval_s=6.0, replicas=2)
    assert {fault.kind for fault in faults} == set(FaultKind)


@given(SEEDS)
@settings(max_examples=30)
def test_every_fault_is_over_before_the_end(seed: int) -> None:
    faults = draw_schedule(seed, 60.0, interval_s=4.0, replicas=2)
    assert all(fault.at_s + fault.seconds <= 60.01 for fault in faults)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)


@given(SEEDS, st.integers(1, 4))
@settings(max_examples=30)
def test_leaving_keeps_a_replica_and_joining_adds_one_at_most(seed: int, replicas: int) -> None:
    left = replicas
    for fault in draw_schedule(seed, 600.0, interval_s=3.0, replicas=replicas):
        left += CHANGES.get(fault.kind, 0)
        assert 1 <= left <= replicas + 1


@given(SEEDS)
@settings(max_examples=30)
@pytest.mark.parametrize("service", ["trainer", "reward"])
def test_no_service_dies_five_times_in_a_row(service: str, seed: int) -> None:
    row, last_s = Counter[str](), float("-inf")
    for fault in draw_schedule(seed, 1200.0, interval_s=2.0, replicas=2):
        if fault.kind in (FaultKind.KILL_ALL, f"kill_{service}"):
            if fault.at_s - last_s >= 150.0 - 0.01:
                row.clear()
            row[service] += 1
            last_s = fault.at_s
            assert row[service] <= 4
