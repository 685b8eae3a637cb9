"""Membership: registration, states, expiry, and counters of all replicas."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from services.trainer.fleet.members import Fleet, MemberState, drop_silent
from sluice.algorithm.accounting import ReplicaCounters
from sluice.errors import InvalidRequestError, NotFoundError
from sluice.types import ReplicaInfo, TensorSpec
from sluice.weight_share import Cut, WeightShare
from tests.support.clock import Clock

LAYOUT = "layout"
TTL_S = 6.0


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(LAYOUT, TTL_S)


def replica(name: str = "a", instance_id: str = "1") -> ReplicaInfo:
    return ReplicaInfo(name, f"{name}-{instance_id}", f"{name}:1", 8)


def load(tokens: int = 0, busy_s: float = 0.0) -> ReplicaCounters:
    return ReplicaCounters(slots_busy=1, generated_tokens=tokens, busy_seconds=busy_s)


def beat(fleet: Fleet, info: ReplicaInfo, now_s: float, **given: object) -> None:
    draining = bool(given.pop("draining", False))
    fleet.heartbeat(info.name, info.instance_id, load(**given), draining=draining, now_s=now_s)  # type: ignore[arg-type]


def states(fleet: Fleet) -> dict[str, MemberState]:
    return {member.info.name: member.state for member in fleet.members()}


def test_a_replica_is_pending_until_it_has_proven_the_weights(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fleet.register(replica(), LAYOUT, 0.0)
    assert states(fleet) == {"a": MemberState.PENDING}
    fleet.mark_serving(replica(), 3)
    fleet.mark_serving(replica(), 3)  # an update, which is not worth a line
    assert caplog.text.count("replica a serves version 3") == 1
    assert states(fleet) == {"a": MemberState.SERVING}
    assert fleet.members()[0].version == 3


def test_two_replicas_of_one_name_are_warned_about_by_their_addresses(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.register(replica(), LAYOUT, 0.0)
    beat(fleet, replica(), 3.0, draining=False)
    fleet.register(replace(replica(instance_id="2"), address="b:1"), LAYOUT, 4.0)
    assert "replica a at b:1 takes the place of the one at a:1, heard 1.0 s ago" in caplog.text


def test_a_replica_with_another_layout_of_weights_is_not_taken_in(fleet: Fleet) -> None:
    with pytest.raises(InvalidRequestError, match=r"replica a: .* use the same model path"):
        fleet.register(replica(), "other", 0.0)
    assert not fleet.members()
    assert not fleet.changed.is_set()


def test_a_share_of_other_weights_is_refused_and_names_replica_and_worker() -> None:
    fleet = Fleet(LAYOUT, TTL_S, weights=[TensorSpec("w", "float32", (4, 2))])
    fitting, beyond = (WeightShare((("w", (Cut(0, ((start, 2),)),)),)) for start in (2, 3))
    fleet.register(replace(replica(), ranks=2, shares=(fitting, fitting)), LAYOUT, 0.0)
    for name in ("a", "b"):  # a replica that is known, and a new one
        info = replace(replica(name), ranks=2, shares=(fitting, beyond))
        with pytest.raises(
            InvalidRequestError,
            match=f"replica {name}, share of worker 1: w: the range of 2 from 3",
        ):
            fleet.register(info, LAYOUT, 1.0)
    assert fleet.members()[0].info.shares == (fitting, fitting)


def test_registering_again_changes_nothing_but_the_address(fleet: Fleet) -> None:
    fleet.register(replica(), LAYOUT, 0.0)
    fleet.mark_serving(replica(), 0)
    moved = replace(replica(), address="elsewhere:2")
    fleet.register(moved, LAYOUT, 1.0)
    assert fleet.in_state(MemberState.SERVING) == (moved,)


def test_a_new_instance_replaces_the_old_one_and_has_no_weights(fleet: Fleet) -> None:
    fleet.register(replica(), LAYOUT, 0.0)
    fleet.mark_serving(replica(), 0)
    fleet.register(replica(instance_id="2"), LAYOUT, 1.0)
    assert fleet.in_state(MemberState.PENDING) == (replica(instance_id="2"),)
    with pytest.raises(NotFoundError, match="register again"):
        beat(fleet, replica(), 2.0)


def test_late_news_of_an_old_instance_do_not_touch_the_new_one(fleet: Fleet) -> None:
    fleet.register(replica(instance_id="2"), LAYOUT, 0.0)
    fleet.mark_serving(replica(), 1)
    fleet.expel(replica(), "too late")
    assert states(fleet) == {"a": MemberState.PENDING}


def test_an_unknown_heartbeat_asks_for_a_registration(fleet: Fleet) -> None:
    with pytest.raises(NotFoundError, match=r"a \(a-1\) is unknown; register again"):
        beat(fleet, replica(), 0.0)


def test_silence_longer_than_the_time_to_live_drops_a_replica(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.register(replica("a"), LAYOUT, 0.0)
    fleet.register(replica("b"), LAYOUT, 0.0)
    beat(fleet, replica("b"), 1.0)
    assert not fleet.expire(TTL_S)
    with caplog.at_level(logging.WARNING):
        assert fleet.expire(TTL_S + 0.5) == (replica("a"),)
    assert states(fleet) == {"b": MemberState.PENDING}
    assert "replica a dropped: no heartbeat for 6.5 s" in caplog.text


def test_a_replica_that_drained_and_left_is_no_warning(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.register(replica(), LAYOUT, 0.0)
    beat(fleet, replica(), 1.0, draining=True)
    with caplog.at_level(logging.WARNING):
        assert fleet.expire(TTL_S + 2.0) == (replica(),)
    assert not caplog.records


@pytest.mark.parametrize(
    ("looks", "is_dropped"),
    [
        ([0.5] * 13, True),
        ([TTL_S + 1.0, 0.5], False),
        ([TTL_S + 1.0, *[0.5] * 13], True),
    ],
)
async def test_the_time_in_which_the_trainer_stood_still_is_no_silence_of_a_replica(
    fleet: Fleet, looks: list[float], *, is_dropped: bool
) -> None:
    clock, gaps = Clock(), iter(looks)
    fleet.register(replica(), LAYOUT, 0.0)

    async def sleep(_seconds: float) -> None:
        for gap in gaps:
            clock.now_s += gap
            return
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await drop_silent(fleet, clock, sleep)
    assert states(fleet) == ({} if is_dropped else {"a": MemberState.PENDING})


def test_a_draining_replica_gets_nothing_new_and_stays_draining(fleet: Fleet) -> None:
    fleet.register(replica(), LAYOUT, 0.0)
    fleet.mark_serving(replica(), 0)
    beat(fleet, replica(), 1.0, draining=True)
    fleet.mark_serving(replica(), 1)
    beat(fleet, replica(), 2.0)
    assert states(fleet) == {"a": MemberState.DRAINING}
    assert not fleet.in_state(MemberState.PENDING, MemberState.SERVING)


def test_only_what_others_must_act_on_is_a_change(fleet: Fleet) -> None:
    def changes() -> bool:
        was_set = fleet.changed.is_set()
        fleet.changed.clear()
        return was_set

    fleet.register(replica(), LAYOUT, 0.0)
    assert changes()
    beat(fleet, replica(), 1.0)
    fleet.register(replica(), LAYOUT, 1.0)
    assert not changes()
    fleet.mark_serving(replica(), 0)
    assert changes()
    beat(fleet, replica(), 2.0, draining=True)
    assert changes()
    beat(fleet, replica(), 3.0, draining=True)
    assert not changes()
    fleet.expel(replica(), "gone")
    assert changes()


def test_an_expelled_replica_may_come_back_and_a_refused_one_may_not(fleet: Fleet) -> None:
    fleet.register(replica("a"), LAYOUT, 0.0)
    fleet.expel(replica("a"), "silent")
    fleet.register(replica("a"), LAYOUT, 1.0)
    fleet.refuse(replica("a"), "its model has other shapes")
    assert not fleet.members()
    with pytest.raises(InvalidRequestError, match="replica a: its model has other shapes"):
        fleet.register(replica("a"), LAYOUT, 2.0)
    fleet.register(replica("a", instance_id="2"), LAYOUT, 3.0)
    assert states(fleet) == {"a": MemberState.PENDING}


def test_rates_are_those_since_the_last_heartbeat(fleet: Fleet) -> None:
    fleet.register(replica(), LAYOUT, 0.0)
    beat(fleet, replica(), 1.0, tokens=100, busy_s=1.0)
    beat(fleet, replica(), 3.0, tokens=500, busy_s=1.5)
    (member,) = fleet.members()
    assert member.tokens_per_second == pytest.approx(200.0)
    assert member.idle_share == pytest.approx(0.75)


def test_totals_count_those_who_left_and_no_token_twice(fleet: Fleet) -> None:
    fleet.register(replica("a"), LAYOUT, 0.0)
    fleet.register(replica("b"), LAYOUT, 0.0)
    beat(fleet, replica("a"), 1.0, tokens=10, busy_s=1.0)
    beat(fleet, replica("b"), 1.0, tokens=5, busy_s=0.5)
    fleet.expel(replica("a"), "silent")
    assert fleet.totals() == (15, 1.5)
    # It was only slow: the same process counts on.
    fleet.register(replica("a"), LAYOUT, 2.0)
    beat(fleet, replica("a"), 3.0, tokens=12, busy_s=1.25)
    assert fleet.totals() == (17, 1.75)
    assert fleet.members()[0].tokens_per_second == pytest.approx(2.0)
    # Another process starts at nothing.
    fleet.register(replica("a", instance_id="2"), LAYOUT, 4.0)
    beat(fleet, replica("a", instance_id="2"), 5.0, tokens=3)
    assert fleet.totals() == (20, 1.75)


def test_no_more_replicas_and_processes_than_the_limits_are_taken_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.fleet.members.MAX_MEMBERS", 2)
    monkeypatch.setattr("services.trainer.fleet.members.MAX_INSTANCES", 3)
    for name in ("a", "b"):
        fleet.register(replica(name), LAYOUT, 0.0)
    with pytest.raises(InvalidRequestError, match="replica c: 2 replicas are registered"):
        fleet.register(replica("c"), LAYOUT, 0.0)
    fleet.register(replica("a", "2"), LAYOUT, 0.0)
    with pytest.raises(InvalidRequestError, match="replica b: 3 processes have registered"):
        fleet.register(replica("b", "2"), LAYOUT, 0.0)
    fleet.register(replica("b"), LAYOUT, 1.0)
