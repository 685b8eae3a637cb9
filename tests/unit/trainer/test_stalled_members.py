"""Members whose engines make no progress: out of use, then back as newcomers."""

from __future__ import annotations

import logging

import pytest

from services.trainer.fleet.members import Fleet, MemberState
from sluice.algorithm.accounting import ReplicaCounters
from sluice.types import ReplicaInfo

LAYOUT, TTL_S, STALL_S = "layout", 6.0, 20.0
INFO = ReplicaInfo("a", "a-1", "a:1", 8)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(LAYOUT, TTL_S, STALL_S)
    fleet.register(INFO, LAYOUT, 0.0)
    beat(fleet, 0.0, tokens=5, turns=1)
    fleet.mark_serving(INFO, 3)
    fleet.changed.clear()
    return fleet


def beat(fleet: Fleet, now_s: float, *, tokens: int, turns: int, busy: int = 4) -> None:
    load = ReplicaCounters(
        slots_busy=busy,
        generated_tokens=tokens,
    )
    fleet.heartbeat("a", "a-1", load, draining=False, now_s=now_s, turns=turns)


def state(fleet: Fleet) -> MemberState:
    (member,) = fleet.members()
    return member.state


def test_a_replica_that_lives_and_draws_nothing_is_no_longer_announced(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(1, 21):
        beat(fleet, float(second), tokens=5, turns=1)
    assert state(fleet) is MemberState.SERVING
    assert not fleet.changed.is_set()
    with caplog.at_level(logging.WARNING):
        beat(fleet, 21.0, tokens=5, turns=1)
    assert not fleet.in_state(MemberState.SERVING, MemberState.PENDING)
    assert fleet.changed.is_set()
    assert "replica a out of use: work, but no token for 21.0 s" in caplog.text
    assert not fleet.expire(22.0)  # it lives


def test_a_replica_that_draws_again_needs_the_present_weights_first(fleet: Fleet) -> None:
    beat(fleet, 21.0, tokens=5, turns=1)
    assert state(fleet) is MemberState.STALLED
    fleet.mark_serving(INFO, 4)  # what was under way does not bring it back
    assert state(fleet) is MemberState.STALLED
    fleet.changed.clear()
    beat(fleet, 22.0, tokens=6, turns=2)
    assert state(fleet) is MemberState.PENDING
    assert fleet.changed.is_set()


def test_a_member_that_was_expelled_while_it_lives_has_to_answer_before_it_counts(
    fleet: Fleet,
) -> None:
    fleet.expel(INFO, "did not answer a probe")
    fleet.register(INFO, LAYOUT, 1.0)
    assert state(fleet) is MemberState.STALLED
    beat(fleet, 2.0, tokens=5, turns=1, busy=0)
    assert state(fleet) is MemberState.STALLED
    beat(fleet, 3.0, tokens=5, turns=2, busy=0)
    assert state(fleet) is MemberState.PENDING


def test_a_member_that_was_only_silent_counts_at_once(fleet: Fleet) -> None:
    assert fleet.expire(7.0) == (INFO,)
    fleet.register(INFO, LAYOUT, 8.0)
    assert state(fleet) is MemberState.PENDING


def test_a_stalled_replica_that_drains_drains(fleet: Fleet) -> None:
    beat(fleet, 21.0, tokens=5, turns=1)
    load = ReplicaCounters(
        generated_tokens=5,
    )
    fleet.heartbeat("a", "a-1", load, draining=True, now_s=22.0, turns=1)
    assert state(fleet) is MemberState.DRAINING
