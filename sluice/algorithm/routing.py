"""Which replica gets the next group: announced replicas, their load and their failures.

State without a clock or I/O; the reward service and the simulator drive it. Capacity is counted in
sequences: a replica holds up to ``slots * slack``, or one group of any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.types import ReplicaInfo

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0


@dataclass(frozen=True, slots=True)
class AnnouncedReplica:
    """A replica and the policy version it serves."""

    info: ReplicaInfo
    policy_version: int


@dataclass(slots=True, eq=False)
class Member:
    """A replica in use. After a failure it pauses, then proves itself with one group."""

    announced: AnnouncedReplica
    num_outstanding: int = 0
    num_groups: int = 0
    paused_until: float = 0.0
    next_pause_s: float = FIRST_PAUSE_S
    on_probation: bool = False
    withdrawn: bool = False

    @property
    def load(self) -> float:
        """Outstanding sequences per slot."""
        return self.num_outstanding / self.announced.info.slots


@dataclass(slots=True, eq=False)
class Grant:
    """Room on a replica for one group, of which `num_missing` sequences are still to come."""

    member: Member
    num_missing: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a group needs of a replica; versions are inclusive."""

    num_sequences: int
    lowest_version: int
    highest_version: int | None = None

    def accepts(self, version: int) -> bool:
        """Whether a replica that serves `version` will do."""
        below = self.highest_version is None or version <= self.highest_version
        return below and version >= self.lowest_version


class Fleet:
    """The replicas of the last announcement.

    Args:
        slack: sequences in flight per slot, at most.
    """

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._members: dict[tuple[str, str], Member] = {}

    @property
    def announced(self) -> tuple[AnnouncedReplica, ...]:
        """All replicas in the order announced."""
        return tuple(member.announced for member in self._members.values())

    def announce(self, replicas: Sequence[AnnouncedReplica]) -> tuple[Member, ...]:
        """Take on a new fleet; pauses end. Returns members that are gone, marked withdrawn."""
        previous, self._members = self._members, {}
        for replica in replicas:
            key = (replica.info.name, replica.info.incarnation)
            member = previous.pop(key, None) or Member(replica)
            member.announced = replica
            member.paused_until = 0.0
            self._members[key] = member
        for gone in previous.values():
            gone.withdrawn = True
        return tuple(previous.values())

    def serves(self, wanted: Wanted) -> bool:
        """Whether any replica, busy or paused, is of a wanted version."""
        return any(wanted.accepts(m.announced.policy_version) for m in self._members.values())

    def choose(self, wanted: Wanted, now: float) -> Member | None:
        """The least loaded replica with room for the group; ``None`` if all are full or paused."""
        candidates = [m for m in self._members.values() if self._has_room(m, wanted, now)]
        return min(candidates, key=lambda member: member.load, default=None)

    def num_free(self, lowest_version: int, now: float) -> int:
        """Sequences that could be started now on replicas of `lowest_version` or later."""
        usable = [
            m
            for m in self._members.values()
            if m.announced.policy_version >= lowest_version and m.paused_until <= now
        ]
        return sum(max(0, self._capacity(m) - m.num_outstanding) for m in usable)

    def grant(self, member: Member, num_sequences: int) -> Grant:
        """Take room for a group on `member`."""
        member.num_outstanding += num_sequences
        member.num_groups += 1
        return Grant(member, num_sequences)

    def sequence_ended(self, grant: Grant) -> None:
        """Give back the room of one finished sequence."""
        grant.member.num_outstanding -= 1
        grant.num_missing -= 1

    def give_back(self, grant: Grant) -> None:
        """Give back what room is left of a group's."""
        grant.member.num_outstanding -= grant.num_missing
        grant.member.num_groups -= 1
        grant.num_missing = 0

    def answered(self, member: Member) -> None:
        """The replica works: end its probation."""
        member.on_probation = False
        member.next_pause_s = FIRST_PAUSE_S

    def failed(self, member: Member, now: float) -> float:
        """Pause a replica that failed; longer each time. Returns when the pause ends."""
        if member.paused_until <= now:
            member.paused_until = now + member.next_pause_s
            member.next_pause_s = min(2 * member.next_pause_s, LONGEST_PAUSE_S)
            member.on_probation = True
        return member.paused_until

    def _capacity(self, member: Member) -> int:
        return math.floor(member.announced.info.slots * self._slack)

    def _has_room(self, member: Member, wanted: Wanted, now: float) -> bool:
        if not wanted.accepts(member.announced.policy_version) or member.paused_until > now:
            return False
        if member.num_groups == 0:
            return True
        if member.on_probation:
            return False
        return member.num_outstanding + wanted.num_sequences <= self._capacity(member)
