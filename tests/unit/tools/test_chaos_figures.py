"""Recovery, stalls, late waits and digests as the chaos tool counts them."""

from __future__ import annotations

import pytest

from sluice.config.schema.service import RewardServiceConfig, ServiceConfig, TrainerServiceConfig
from tools.chaos.late_waits import ObservedWait, WaitLimits, late_waits, limits_of
from tools.chaos.observation import DigestReading, digest_mismatches
from tools.chaos.recovery import Yield, longest_pause_s, percentile, recovery_s, tokens_per_s

# A second each with 10 tokens, but for 20 to 27 s.
YIELDS = [Yield(float(s), 10.0) for s in range(60) if not 20 <= s < 27]
LIMITS = WaitLimits((("generating", 10.0),), 100.0)


def recovery(fault_s: float, full_rate: float = 10.0, end_s: float = 59.0) -> float | None:
    return recovery_s(YIELDS, fault_s, full_rate=full_rate, window_s=5.0, end_s=end_s)


def test_throughput_is_of_what_ended_within_the_time() -> None:
    assert tokens_per_s(YIELDS, 10.0, 20.0) == 10.0
    assert tokens_per_s(YIELDS, 20.0, 27.0) == 0.0


def test_a_fault_that_costs_nothing_recovers_at_once() -> None:
    assert recovery(5.0) == 0.0


def test_recovery_ends_where_a_window_of_full_throughput_begins() -> None:
    assert recovery(19.5) == 7.5


def test_a_recovery_that_was_not_seen_is_told_as_such() -> None:
    assert recovery(19.5, full_rate=11.0) is None
    assert recovery(19.5, end_s=31.0) is None


def test_the_longest_pause_counts_both_edges() -> None:
    assert longest_pause_s([3.0, 4.0], 0.0, 9.0) == 5.0
    assert longest_pause_s([5.0, 8.0], 0.0, 9.0) == 5.0
    assert longest_pause_s([], 2.0, 9.0) == 7.0


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile([], 0.5) is None


def reading(at_s: float, seconds: float, phase: str = "generating") -> ObservedWait:
    return ObservedWait(at_s, "reward", "rollout-0", phase, seconds)


def test_a_wait_past_its_deadline_is_found_once() -> None:
    seen = [reading(50.0 + s, 10.0 + s) for s in range(8)]
    (late,) = late_waits(seen, LIMITS, grace_s=5.0)
    assert (late.wait.seconds, late.allowed_s) == (17.0, 10.0)


def test_a_wait_within_its_deadline_and_the_grace_is_not_late() -> None:
    assert late_waits([reading(50.0, 15.0)], LIMITS, grace_s=5.0) == ()
    assert late_waits([reading(500.0, 90.0, "making room")], LIMITS, grace_s=5.0) == ()


def test_a_wait_whose_phase_counts_something_is_found_once_and_by_its_own_deadline() -> None:
    phases = [f"generating {9 - s} groups" for s in range(8)]
    seen = [reading(500.0 + s, 106.0 + s, phase) for s, phase in enumerate(phases)]
    assert [one.allowed_s for one in late_waits(seen, LIMITS, grace_s=5.0)] == [100.0]


def test_time_in_which_the_waiting_process_was_stopped_does_not_count() -> None:
    seen = [reading(50.0, 20.0)]
    assert late_waits(seen, LIMITS, [("reward", 32.0, 40.0)], grace_s=5.0) == ()
    assert len(late_waits(seen, LIMITS, [("reward", 0.0, 32.0)], grace_s=5.0)) == 1
    assert len(late_waits(seen, LIMITS, [("trainer", 32.0, 40.0)], grace_s=5.0)) == 1


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [("generating", 7.0), ("joining epoch 16", 30.0), ("filling a batch", 400.0)],
)
def test_deadlines_come_from_the_configuration(phase: str, seconds: float) -> None:
    service = ServiceConfig(
        reward=RewardServiceConfig(stall_timeout_s=7.0, generate_timeout_s=30.0),
        trainer=TrainerServiceConfig(batch_timeout_s=400.0),
    )
    assert limits_of(service).allowed_s(phase) == seconds


def test_two_digests_of_one_version_of_one_trainer_are_a_mismatch() -> None:
    sights = {DigestReading("t1", 3, "r0", "aa"), DigestReading("t1", 3, "r1", "ab")}
    assert digest_mismatches(sights) == [("t1", 3)]


def test_a_later_trainer_may_give_a_version_other_weights() -> None:
    sights = {DigestReading("t1", 3, "r0", "aa"), DigestReading("t2", 3, "r1", "ab")}
    assert digest_mismatches(sights) == []
