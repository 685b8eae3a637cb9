"""A replica's sequences advance in step, and end after exactly their tokens."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.simulate.fleet import SimulatedReplica
from sluice.simulate.group import SimulatedSample
from sluice.simulate.settings import FleetSettings

NO_PART: Any = None


def samples(*tokens: int) -> list[SimulatedSample]:
    return [SimulatedSample(NO_PART, count, is_right=True) for count in tokens]


def replica(slots: int = 4, base_s: float = 1.0, per_sequence_s: float = 0.0) -> SimulatedReplica:
    return SimulatedReplica(
        FleetSettings(slots=slots, base_step_s=base_s, per_sequence_s=per_sequence_s)
    )


def test_a_step_takes_longer_the_more_sequences_run() -> None:
    one = replica(base_s=1.0, per_sequence_s=0.5)
    one.add(samples(10, 20), 0.0)
    assert one.next_end(0.0) == pytest.approx(20.0)  # 10 steps of 2 s
    assert [sample.tokens for sample in one.take_finished(20.0)] == [10]
    assert one.next_end(20.0) == pytest.approx(35.0)  # 10 more of 1.5 s
    assert [sample.tokens for sample in one.take_finished(35.0)] == [20]
    assert one.generated_tokens == pytest.approx(30.0)
    assert one.busy_s == pytest.approx(35.0)


def test_who_has_no_slot_waits_in_order() -> None:
    one = replica(slots=1)
    first, second, third = samples(2, 3, 4)
    one.add([first, second, third], 0.0)
    assert second.start_clock is None
    assert one.take_finished(2.0) == [first]
    assert second.start_clock == pytest.approx(2.0)
    assert third.start_clock is None
    assert one.next_end(2.0) == pytest.approx(5.0)


def test_a_swap_stalls_and_keeps_tokens_and_later_sequences_are_of_the_new_version() -> None:
    one = replica()
    before, after = samples(10, 1)
    one.add([before], 0.0)
    one.swap(4.0, 1, 3.0)
    one.add([after], 5.0)
    assert one.next_end(5.0) == pytest.approx(8.0)  # it starts where the stall ends
    assert one.take_finished(8.0) == [after]
    assert one.next_end(8.0) == pytest.approx(13.0)
    assert (before.oldest_version, after.oldest_version) == (0, 1)


def test_a_broken_off_sequence_gives_its_slot_and_tells_its_tokens() -> None:
    one = replica(slots=1)
    first, second = samples(10, 5)
    one.add([first, second], 0.0)
    assert one.abort([first], 4.0) == pytest.approx(4.0)
    assert one.next_end(4.0) == pytest.approx(9.0)
    assert one.abort([first], 5.0) == 0.0
    assert one.num_tokens_sampled([second], 6.0) == pytest.approx(2.0)
    assert one.generated_tokens == pytest.approx(6.0)


def test_an_idle_replica_is_not_busy() -> None:
    one = replica()
    one.advance(50.0)
    assert one.next_end(50.0) is None
    assert one.busy_s == 0.0
