"""Demand for replicas is measured over the last batches."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.reward.telemetry import DemandMeter, FleetStatus
from sluice.algorithm.routing import HEADROOM

BUSY = FleetStatus(1, is_starved=False, slots_in_use=32, num_slots=64, num_replicas=4)


class Loop:
    """A loop whose facts a test sets."""

    def __init__(self, facts: FleetStatus) -> None:
        self.facts = facts
        self.meter = DemandMeter(lambda: self.facts)

    def run(self, began_s: int, ended_s: int, **changes: object) -> None:
        """The facts change, and are looked at each second."""
        self.facts = replace(self.facts, **changes)  # type: ignore[arg-type]
        for second in range(began_s, ended_s + 1):
            self.meter.measure(float(second))


def test_before_the_first_batch_nothing_is_known() -> None:
    loop = Loop(replace(BUSY, num_batches=0, is_starved=True))
    loop.run(0, 30)
    assert (loop.meter.slots, loop.meter.replicas) == (None, None)
    assert loop.meter.starved_s == 30.0


def test_what_a_look_finds_held_since_the_look_before() -> None:
    loop = Loop(replace(BUSY, slots_in_use=10, is_starved=True))
    loop.meter.measure(0.0)
    loop.facts = replace(BUSY, slots_in_use=20, is_starved=False)
    loop.meter.measure(5.0)
    assert (loop.meter.slot_seconds, loop.meter.starved_s) == (50.0, 5.0)
    loop.meter.measure(7.0)
    assert (loop.meter.slot_seconds, loop.meter.starved_s) == (90.0, 5.0)


def test_a_half_idle_fleet_that_feeds_the_trainer_is_too_large() -> None:
    loop = Loop(BUSY)
    loop.run(0, 30)
    assert loop.meter.slots == pytest.approx(32 * HEADROOM)
    assert loop.meter.replicas == 3
    assert loop.meter.slot_seconds == 32 * 30


def test_a_full_fleet_that_lets_the_trainer_wait_half_of_the_time_is_half_of_what_is_wanted() -> (
    None
):
    loop = Loop(replace(BUSY, slots_in_use=64))
    for began_s in range(0, 40, 20):
        loop.run(began_s, began_s + 10, is_starved=False)
        loop.run(began_s + 10, began_s + 20, is_starved=True)
    # Each change is seen at the look that ends the second before it.
    assert loop.meter.slots == pytest.approx(128 * HEADROOM, rel=0.1)
    assert loop.meter.replicas == 9


def test_what_lies_more_than_some_batches_back_counts_no_more() -> None:
    loop = Loop(replace(BUSY, slots_in_use=64, is_starved=True))
    loop.run(0, 100)
    for number in range(2, 8):
        began_s = 100 + (number - 2) * 100
        loop.run(began_s, began_s + 100, num_batches=number, slots_in_use=16, is_starved=False)
    assert loop.meter.slots == pytest.approx(16 * HEADROOM)
    assert loop.meter.replicas == 2


def test_batches_of_a_moment_do_not_shorten_the_time_that_is_looked_at() -> None:
    loop = Loop(replace(BUSY, slots_in_use=0))
    loop.run(0, 40)
    for second in range(40, 59):
        loop.run(second, second, num_batches=second, slots_in_use=60)
    assert loop.meter.slots == pytest.approx(60 * 18 / 58 * HEADROOM)


async def test_it_looks_while_the_block_runs_and_not_after() -> None:
    loop = Loop(BUSY)
    with loop.meter.measuring():
        assert loop.meter.slots is not None
    pending = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert pending == []
