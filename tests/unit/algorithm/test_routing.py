"""The fleet's choice is that of looking at every replica, whatever happened to it before."""

from __future__ import annotations

import math
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.routing import (
    AnnouncedReplica,
    Offer,
    ReplicaRequirement,
    ReplicaRouter,
    ReplicaUse,
    Reservation,
    RoutedReplica,
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
    if not suits(member, wanted) or member.paused_until > now:
        return False
    if member.num_groups == 0:
        return True
    fits = member.num_outstanding + wanted.num_sequences <= capacity(member)
    return fits and not member.on_probation


def expected(
    members: list[RoutedReplica],
    wanted: ReplicaRequirement,
    now: float,
    taken: Collection[Offer] = (),
) -> RoutedReplica | None:
    untaken = [m for m in members if m.announced.offer not in taken]
    candidates = [m for m in untaken if has_capacity(m, wanted, now)]
    return min(candidates, key=lambda m: m.load, default=None)


def expected_free(members: list[RoutedReplica], lowest: int, now: float) -> int:
    return sum(
        max(0, capacity(m) - m.num_outstanding)
        for m in members
        if m.announced.policy_version >= lowest
        and m.announced.use is not ReplicaUse.VALIDATION
        and m.paused_until <= now
    )


FLEETS = st.lists(
    st.tuples(st.sampled_from([2, 4, 8]), st.integers(0, 2), st.sampled_from(ReplicaUse)),
    min_size=1,
    max_size=6,
)
WANTED = st.builds(
    ReplicaRequirement, st.integers(1, 9), st.integers(0, 2), st.sampled_from([None, 0, 1, 2])
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
def test_the_least_loaded_replica_with_room_is_chosen_whatever_happened_before(
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
                fleet.sequence_ended(reservations[pick % len(reservations)])
            case "give_back" if reservations:
                fleet.give_back(reservations.pop(pick % len(reservations)))
            case "fail":
                fleet.failed(members[pick % len(members)], now)
            case "answer":
                fleet.answered(members[pick % len(members)])
            case "announce":
                announce(then if pick % 2 else fleet_of)


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
