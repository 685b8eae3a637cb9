"""The fleet's choice is that of looking at every replica, whatever happened to it before."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.routing import (
    AnnouncedReplica,
    MeanContext,
    ReplicaOffer,
    ReplicaRequirement,
    ReplicaRouter,
    ReplicaUse,
    Reservation,
    RoutedReplica,
    sequences_at_once,
)
from sluice.types import ReplicaInfo

SLACK = 1.5


def announced(
    number: int, slots: int, version: int, use: ReplicaUse = ReplicaUse.ANY
) -> AnnouncedReplica:
    return AnnouncedReplica(ReplicaInfo(f"r{number}", "i", f"h:{number}", slots), version, use)


def suits(member: RoutedReplica, wanted: ReplicaRequirement) -> bool:
    replica = member.announced
    is_validation = wanted.highest_version is not None
    other = ReplicaUse.TRAINING if is_validation else ReplicaUse.VALIDATION
    return wanted.accepts(replica.policy_version) and replica.use is not other


def capacity(member: RoutedReplica) -> int:
    return math.floor(member.announced.info.slots * SLACK)


def has_capacity(member: RoutedReplica, wanted: ReplicaRequirement, now: float) -> bool:
    if not suits(member, wanted) or member.paused_until > now or member.trial:
        return False
    fits = member.num_outstanding + wanted.num_sequences <= capacity(member)
    return member.num_groups == 0 or fits


def expected(
    members: list[RoutedReplica],
    wanted: ReplicaRequirement,
    now: float,
    taken: Collection[ReplicaOffer] = (),
) -> RoutedReplica | None:
    untaken = [m for m in members if m.announced.offer not in taken]
    candidates = [m for m in untaken if has_capacity(m, wanted, now)]
    least = min(candidates, key=lambda m: m.load, default=None)
    for m in candidates:
        if m.announced.info.name == wanted.prefer and m.load <= least.load + 0.25:
            return m
    return least


def expected_free(members: list[RoutedReplica], lowest: int, now: float) -> int:
    return sum(
        max(0, capacity(m) - m.num_outstanding)
        for m in members
        if m.announced.policy_version >= lowest
        and m.announced.use is not ReplicaUse.VALIDATION
        and m.paused_until <= now
        and not m.trial
    )


FLEETS = st.lists(
    st.tuples(st.sampled_from([2, 4, 8]), st.integers(0, 2), st.sampled_from(ReplicaUse)),
    min_size=1,
    max_size=6,
)
WANTED = st.builds(
    ReplicaRequirement,
    st.integers(1, 9),
    st.integers(0, 2),
    st.sampled_from([None, 0, 1, 2]),
    st.sampled_from(["", "r0", "r1", "r9"]),
)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["grant", "grant", "end", "end", "give_back", "fail", "answer", "announce"]
        ),
        WANTED,
        st.integers(0, 50),
    ),
    max_size=60,
)


@given(fleet_of=FLEETS, then=FLEETS, actions=ACTIONS)
def test_the_least_loaded_replica_with_capacity_is_chosen_whatever_happened_before(
    fleet_of: list[tuple[int, int, ReplicaUse]],
    then: list[tuple[int, int, ReplicaUse]],
    actions: list[tuple],
) -> None:
    fleet = ReplicaRouter(SLACK)
    members: list[RoutedReplica] = []
    reservations: list[Reservation] = []

    def announce(replicas: list[tuple[int, int, ReplicaUse]]) -> None:
        fleet.announce([announced(i, *one) for i, one in enumerate(replicas)])
        members[:] = list(fleet._members.values())

    announce(fleet_of)
    for now, (action, wanted, pick) in enumerate(actions):
        chosen = fleet.choose(wanted, now)
        assert chosen is expected(members, wanted, now)
        assert fleet.num_free(wanted.lowest_version, now) == expected_free(
            members, wanted.lowest_version, now
        )
        taken = {members[pick % len(members)].announced.offer}
        assert fleet.choose(wanted, now, taken) is expected(members, wanted, now, taken)
        assert set(fleet.offers) == {m.announced.offer for m in members}
        assert {offer for offer in fleet.offers if wanted.takes(offer)} == {
            m.announced.offer for m in members if suits(m, wanted)
        }
        match action:
            case "grant" if chosen is not None:
                reservations.append(fleet.reservation(chosen, wanted.num_sequences))
            case "end" if reservations and reservations[pick % len(reservations)].num_missing:
                fleet.release_sequences(reservations[pick % len(reservations)], 1)
            case "give_back" if reservations:
                fleet.give_back(reservations.pop(pick % len(reservations)))
            case "fail":
                fleet.pause(members[pick % len(members)], now)
            case "answer":
                fleet.end_probation(members[pick % len(members)])
            case "announce":
                announce(then if pick % 2 else fleet_of)


def test_a_replica_that_leaves_the_validated_version_never_serves_it_whatever_it_serves_now() -> (
    None
):
    wanted = ReplicaRequirement(1, 3, 3)

    def offer(version: int, use: ReplicaUse = ReplicaUse.ANY) -> ReplicaOffer:
        return ReplicaOffer(version, use)

    assert wanted.is_unservable([offer(2, ReplicaUse.TRAINING), offer(4)])
    assert not wanted.is_unservable([offer(2), offer(4)])  # it may get version 3
    assert not wanted.is_unservable([offer(3, ReplicaUse.VALIDATION), offer(4)])


def test_slots_of_replicas_that_are_held_for_a_validation_are_not_in_use() -> None:
    fleet = ReplicaRouter(1.0)
    fleet.announce([announced(0, 4, 3, ReplicaUse.VALIDATION), announced(1, 4, 4)])
    for wanted in (ReplicaRequirement(3, 3, 3), ReplicaRequirement(2, 4)):
        member = fleet.choose(wanted, 0.0)
        assert member is not None
        fleet.reservation(member, wanted.num_sequences)
    assert fleet.num_slots_in_use == 2


def test_capacity_of_a_removed_replica_never_comes_back() -> None:
    fleet = ReplicaRouter(1.0)
    fleet.announce([announced(0, 4, 0), announced(1, 4, 0)])
    wanted = ReplicaRequirement(4, 0)
    first = fleet.choose(wanted, 0.0)
    assert first is not None
    reservation = fleet.reservation(first, 4)
    fleet.announce([announced(1, 4, 0)])
    fleet.give_back(reservation)
    assert fleet.num_free(0, 0.0) == 4
    assert fleet.choose(wanted, 0.0) is not first


def test_a_replica_that_proves_itself_with_one_group_offers_nothing_beyond_it() -> None:
    fleet = ReplicaRouter(1.0)
    fleet.announce([announced(0, 8, 0)])
    failed = fleet._by_name["r0"]
    fleet.pause(failed, 0.0)
    fleet.announce([announced(0, 8, 1)])  # ends the pause, not the probation
    assert fleet.num_free(0, 0.0) == 8
    fleet.reservation(failed, 2)
    assert fleet.choose(ReplicaRequirement(2, 0), 0.0) is None
    assert fleet.num_free(0, 0.0) == 0
    fleet.end_probation(failed)
    assert fleet.num_free(0, 0.0) == 6


def _loaded(*loads: int, slots: int = 8) -> ReplicaRouter:
    fleet = ReplicaRouter(SLACK)
    fleet.announce([announced(number, slots, 1) for number in range(len(loads))])
    for member, load in zip(list(fleet._members.values()), loads, strict=True):
        if load:
            fleet.reservation(member, load)
    return fleet


def _chosen(fleet: ReplicaRouter, prefer: str, *, lowest: int = 0) -> str | None:
    member = fleet.choose(ReplicaRequirement(1, lowest, prefer=prefer), 0.0)
    return None if member is None else member.announced.info.name


@pytest.mark.parametrize(
    ("load", "chosen"), [(0, "r1"), (3, "r1"), (4, "r1"), (5, "r0"), (8, "r0")]
)
def test_a_prefix_is_followed_up_to_a_quarter_of_the_slots_above_the_least_load(
    load: int, chosen: str
) -> None:
    assert _chosen(_loaded(2, load), "r1") == chosen


def test_a_preferred_replica_that_left_failed_is_full_or_of_another_version_is_not_waited_for() -> (
    None
):
    fleet = _loaded(0, 0, 0)
    assert _chosen(fleet, "gone") == "r0"
    fleet.pause(fleet._by_name["r1"], 0.0)
    assert _chosen(fleet, "r1") == "r0"
    fleet.announce([announced(0, 8, 2), announced(1, 8, 1)])
    assert _chosen(fleet, "r1", lowest=2) == "r0"
    full = _loaded(10, 12)
    assert _chosen(full, "r1") == "r0"
    assert _chosen(_loaded(12, 12), "r1") is None


@dataclass(frozen=True)
class _Played:
    """`kept`: later turns on the replica of the turn before; `spread`: most over mean load."""

    kept: float
    spread: float


def _play(*, sticky: bool, sessions: int, slots: int = 16) -> _Played:
    """Play sessions of eight turns on four replicas, with tools in between, until 2,000 ended."""
    fleet, rng = _loaded(0, 0, 0, 0, slots=slots), random.Random(7)
    members = list(fleet._members.values())
    # When, which session, how many turns it had, where the last one was, and its reservation.
    events: list[tuple[float, int, int, str, Reservation | None]] = [
        (rng.random(), number, 0, "", None) for number in range(sessions)
    ]
    heapify(events)
    started, kept, later, now, weighted = sessions, 0, 0, 0.0, 0.0
    while started < 2_000:
        when, number, turn, where, reservation = heappop(events)
        loads = [member.num_outstanding for member in members]
        weighted += (when - now) * max(loads) / max(sum(loads) / len(loads), 1)
        now = when
        if reservation is not None:
            fleet.release_sequences(reservation, 1)
            fleet.give_back(reservation)
            if turn == 8:
                number, turn, where, started = started, 0, "", started + 1
            heappush(events, (now + rng.expovariate(1.0), number, turn, where, None))
            continue
        prefer = where if sticky else ""
        member = fleet.choose(ReplicaRequirement(1, 0, prefer=prefer), now)
        if member is None:
            heappush(events, (now + 0.1, number, turn, where, None))
            continue
        name = member.announced.info.name
        later, kept = later + (turn > 0), kept + (name == where)
        end = now + rng.lognormvariate(0.5, 0.7)
        heappush(events, (end, number, turn + 1, name, fleet.reservation(member, 1)))
    return _Played(kept / later, weighted / now)


@pytest.mark.parametrize("sessions", [48, 80, 112])
def test_sessions_keep_their_replica_and_spread_the_load(sessions: int) -> None:
    played = _play(sticky=True, sessions=sessions)
    assert played.kept >= 0.9
    assert played.spread <= 1.3
    assert _play(sticky=False, sessions=sessions).kept < 0.5


@pytest.mark.parametrize(
    ("kv_tokens", "context", "sequences"),
    [
        (0, 1000.0, 12),  # it does not say what its cache holds
        (4000, 0.0, 12),  # no sequence has ended
        (8000, 1000.0, 12),  # a cache for all slots
        (4000, 1000.0, 6),
        (4000, 999.0, 6),
        (100, 1000.0, 1),  # one always runs
    ],
)
def test_a_replica_gets_as_many_sequences_as_its_cache_holds_of_their_expected_context(
    kv_tokens: int, context: float, sequences: int
) -> None:
    info = ReplicaInfo("r", "i", "h:1", 8, kv_tokens=kv_tokens)
    assert sequences_at_once(info, SLACK, context) == sequences


def test_the_expected_context_follows_the_last_sequences_in_steps_of_a_tenth() -> None:
    mean = MeanContext()
    assert mean.expected == 0.0
    assert mean.add(1000)
    assert mean.expected == 1000
    assert not any(mean.add(length) for length in (1010, 990) * 20)
    changes = sum(mean.add(2000) for _ in range(2000))
    assert mean.expected == pytest.approx(2000, rel=0.1)
    assert 0 < changes <= 8


def test_longer_sequences_leave_less_capacity_and_paused_replicas_stay_paused() -> None:
    fleet = ReplicaRouter(1.0)
    replicas = [ReplicaInfo(f"r{n}", "i", f"h:{n}", 8, kv_tokens=4000) for n in range(2)]
    fleet.announce([AnnouncedReplica(info, 1) for info in replicas])
    assert fleet.num_free(0, 0.0) == 16
    fleet.pause(fleet._by_name["r0"], 0.0)
    fleet.note_context(1000)
    assert fleet.num_free(0, 0.0) == 4
    wanted = ReplicaRequirement(4, 0)
    member = fleet.choose(wanted, 0.0)
    assert member is fleet._by_name["r1"]
    reservation = fleet.reservation(member, 4)
    assert fleet.num_free(0, 0.0) == 0
    assert fleet.choose(ReplicaRequirement(1, 0), 0.0) is None
    for _ in range(1000):
        fleet.note_context(400)
    assert fleet.num_free(0, 0.0) == 4
    fleet.give_back(reservation)
    assert fleet.num_free(0, 0.0) == 8


def test_an_idle_replica_whose_cache_holds_less_than_a_group_counts_as_one_group() -> None:
    fleet = ReplicaRouter(1.0)
    fleet.announce([AnnouncedReplica(ReplicaInfo("r", "i", "h:1", 8, kv_tokens=2000), 1)])
    fleet.note_context(1000)
    assert fleet.num_free(0, 0.0, group_size=4) == 4
    member = fleet.choose(ReplicaRequirement(4, 0), 0.0)
    assert member is not None
    fleet.reservation(member, 4)
    assert fleet.num_free(0, 0.0, group_size=4) == 0
