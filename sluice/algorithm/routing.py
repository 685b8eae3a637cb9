"""Choose the replica of the next group, and estimate how many replicas keep the trainer fed (the
number that an autoscaler follows).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sluice.types import ReplicaInfo

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0

HEADROOM = 1.1
"""A fleet that is exactly fast enough makes the trainer wait about every other time."""

MAX_GROWTH = 4.0
"""Most times the present fleet that one measurement may give: beyond it nothing is known about how
the work would spread. The next measurement continues from there."""

STICKY_MARGIN = 0.25
"""How far the load of the replica that holds a prefix may be above the least one's, in slots per
slot. Beyond it a turn waits longer for a token than its prefix takes to compute elsewhere."""

_DEMAND_ROUNDING = 1e-9
_CONTEXTS, _STEP = 256, 0.1


class ReplicaUse(StrEnum):
    """The purposes for which a replica gets requests, if its version fits."""

    ANY = "any"
    TRAINING = "training"  # it leaves the version that is validated
    VALIDATION = "validation"  # it is held at the version that is validated


class ReplicaOffer(NamedTuple):
    """The properties of a replica that matter to a group: version and use."""

    version: int
    use: ReplicaUse


@dataclass(frozen=True, slots=True)
class AnnouncedReplica:
    """A replica, the policy version that it serves, and its use."""

    info: ReplicaInfo
    policy_version: int
    use: ReplicaUse = ReplicaUse.ANY

    @property
    def offer(self) -> ReplicaOffer:
        """Its version and use."""
        return ReplicaOffer(self.policy_version, self.use)


@dataclass(slots=True, eq=False)
class RoutedReplica:
    """A replica in use. After an error that may be its fault it pauses, then gets one group as a
    trial, beside those that it still has.

    `order` is its index in the announcement, `capacity` the most sequences at once, `trial` the
    reservation of the group that it gets as a trial.
    """

    announced: AnnouncedReplica
    order: int = 0
    capacity: int = 0
    num_outstanding: int = 0
    num_groups: int = 0
    paused_until: float = 0.0
    next_pause_s: float = FIRST_PAUSE_S
    on_probation: bool = False
    trial: Reservation | None = None
    removed: bool = False

    @property
    def load(self) -> float:
        """Outstanding sequences per slot."""
        return self.num_outstanding / self.announced.info.slots

    @property
    def num_free(self) -> int:
        """How many more sequences it may have."""
        return max(0, self.capacity - self.num_outstanding)

    def has_capacity(self, num_sequences: int, now_s: float) -> bool:
        """Return whether it takes `num_sequences` now; an idle replica takes a group of any
        size."""
        if self.paused_until > now_s or self.trial:
            return False
        return self.num_groups == 0 or self.num_outstanding + num_sequences <= self.capacity


@dataclass(slots=True, eq=False)
class Reservation:
    """Capacity of a replica for one group; `num_missing` sequences are still to come."""

    member: RoutedReplica
    num_missing: int


@dataclass(frozen=True, slots=True)
class ReplicaRequirement:
    """What a group needs of a replica; versions are inclusive.

    Only a validation has a `highest_version`: groups for training take any newer one.

    Attributes:
        prefer: name of the replica that holds the beginning of the prompt; empty: none does.
    """

    num_sequences: int
    lowest_version: int
    highest_version: int | None = None
    prefer: str = ""

    def accepts(self, version: int) -> bool:
        """Return whether tokens of `version` are acceptable."""
        is_not_newer = self.highest_version is None or version <= self.highest_version
        return is_not_newer and version >= self.lowest_version

    def takes(self, offer: ReplicaOffer) -> bool:
        """Return whether a replica with this offer is acceptable."""
        excluded_use = (
            ReplicaUse.VALIDATION if self.highest_version is None else ReplicaUse.TRAINING
        )
        return offer.use is not excluded_use and self.accepts(offer.version)

    def is_unservable(self, offers: Collection[ReplicaOffer]) -> bool:
        """Return whether no replica is acceptable, now or later.

        Versions only rise, and a replica that is about to swap is not held later: its next version
        is newer than the one that is validated. Without any replica the next one may still do.
        """
        highest = self.highest_version
        if highest is None or not offers:
            return False
        return all(
            (offer.version >= highest or offer.use is ReplicaUse.TRAINING) and not self.takes(offer)
            for offer in offers
        )


def sequences_at_once(info: ReplicaInfo, slack: float, context: float) -> int:
    """Return how many sequences a replica may have at once, at least 1.

    Args:
        slack: sequences for each one that runs.
        context: tokens that a sequence is expected to have at its end; 0: not known.
    """
    running = float(info.slots)
    if info.kv_tokens and context > 0:
        running = min(running, info.kv_tokens / context)
    return max(1, math.floor(running * slack))


class MeanContext:
    """The tokens of a sequence at its end, with its share of the prompt.

    They are a mean over about the last 256 sequences.

    Attributes:
        expected: the mean, which follows in steps of a tenth; 0 before the first sequence.
    """

    def __init__(self) -> None:
        self.expected = 0.0
        self._mean = 0.0
        self._num_seen = 0

    def add(self, num_tokens: int) -> bool:
        """Take a sequence that has ended; return whether `expected` changed."""
        self._num_seen = min(self._num_seen + 1, _CONTEXTS)
        self._mean += (num_tokens - self._mean) / self._num_seen
        if abs(self._mean - self.expected) <= _STEP * self.expected:
            return False
        self.expected = self._mean
        return True


class ReplicaRouter:
    """The replicas of the last announcement.

    Args:
        slack: sequences in flight per slot, at most.

    Attributes:
        announced: all replicas in the order announced.
    """

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self.announced: tuple[AnnouncedReplica, ...] = ()
        self._members: dict[tuple[str, str], RoutedReplica] = {}
        self._by_name: dict[str, RoutedReplica] = {}
        self._context = MeanContext()
        self._num_free: Counter[ReplicaOffer] = Counter()  # sequences
        self._min_capacity = 0
        # Those that may be paused or on probation.
        self._watched_members: set[RoutedReplica] = set()

    @property
    def num_slots_in_use(self) -> int:
        """Slots that run a sequence; further sequences of a replica wait there.

        Slots of replicas that serve validation only do not count.
        """
        return sum(
            min(member.num_outstanding, member.announced.info.slots)
            for member in self._members.values()
            if member.announced.use is not ReplicaUse.VALIDATION
        )

    @property
    def has_sequences(self) -> bool:
        """Whether a replica has a sequence, of training or of a validation."""
        return any(member.num_outstanding for member in self._members.values())

    def announce(self, replicas: Sequence[AnnouncedReplica]) -> tuple[RoutedReplica, ...]:
        """Replace the fleet and end pauses. Return the members that left, marked as removed."""
        previous, self._members, self._by_name = self._members, {}, {}
        for replica in replicas:
            key = (replica.info.name, replica.info.instance_id)
            member = previous.pop(key, None) or RoutedReplica(replica)
            member.announced = replica
            member.order, member.paused_until = len(self._members), 0.0
            self._members[key] = self._by_name[replica.info.name] = member
        self.announced = tuple(member.announced for member in self._members.values())
        for departed in previous.values():
            departed.removed = True
        self._watched_members = {member for member in self._members.values() if member.on_probation}
        self._arrange()
        return tuple(previous.values())

    @property
    def offers(self) -> Collection[ReplicaOffer]:
        """The offers of all replicas, busy and paused ones too."""
        return self._num_free.keys()

    def choose(
        self,
        requirement: ReplicaRequirement,
        now_s: float,
        taken_offers: Collection[ReplicaOffer] = (),
    ) -> RoutedReplica | None:
        """Return the replica that takes the group, or ``None``: none has capacity.

        The preferred one takes it unless its load is more than `STICKY_MARGIN` above the least
        one's; otherwise the least loaded one does.

        Args:
            taken_offers: offers that other groups wait for.
        """
        offers = {
            offer
            for offer in self._num_free
            if offer not in taken_offers and requirement.takes(offer)
        }
        if not offers:
            return None
        least_loaded: RoutedReplica | None = None
        for member in self._members.values():
            if (
                (least_loaded is None or member.load < least_loaded.load)
                and member.announced.offer in offers
                and member.has_capacity(requirement.num_sequences, now_s)
            ):
                least_loaded = member
        preferred = self._by_name.get(requirement.prefer)
        if least_loaded is None or preferred is None or preferred.announced.offer not in offers:
            return least_loaded
        if preferred.load > least_loaded.load + STICKY_MARGIN:
            return least_loaded
        return (
            preferred if preferred.has_capacity(requirement.num_sequences, now_s) else least_loaded
        )

    def num_free(self, lowest_version: int, now_s: float, group_size: int = 1) -> int:
        """Return how many training sequences could start now, on `lowest_version` or later.

        An idle replica takes a group of any size, so it counts as at least `group_size`.
        """
        free = 0
        if group_size > self._min_capacity:  # what idle ones take of a group beyond their own
            free = sum(
                max(0, group_size - member.capacity)
                for member in self._members.values()
                if member.num_groups == 0
                and member.paused_until <= now_s
                and member.announced.policy_version >= lowest_version
                and member.announced.use is not ReplicaUse.VALIDATION
            )
        for offer, count in self._num_free.items():  # asked at every start: no generator
            if offer.version >= lowest_version and offer.use is not ReplicaUse.VALIDATION:
                free += count
        if not self._watched_members:
            return free
        refused = sum(
            member.num_free
            for member in self._watched_members
            if (member.paused_until > now_s or member.trial)
            and member.announced.policy_version >= lowest_version
            and member.announced.use is not ReplicaUse.VALIDATION
        )
        return free - refused

    def reservation(self, member: RoutedReplica, num_sequences: int) -> Reservation:
        """Reserve capacity for a group on `member`."""
        member.num_groups += 1
        self._load(member, num_sequences)
        reservation = Reservation(member, num_sequences)
        if member.on_probation:
            member.trial = reservation
        return reservation

    def release_sequences(self, reservation: Reservation, count: int) -> None:
        """Release the capacity of finished sequences."""
        reservation.num_missing -= count
        self._load(reservation.member, -count)

    def note_context(self, num_tokens: int) -> None:
        """Note the tokens of a sequence at its end, with its share of the group's prompt.

        From them follows how many sequences fill a replica's KV cache.
        """
        if self._context.add(num_tokens):
            self._arrange()

    def give_back(self, reservation: Reservation) -> None:
        """Release the capacity that is left of a group's reservation."""
        member = reservation.member
        member.num_groups -= 1
        if member.trial is reservation:
            member.trial = None
        self._load(member, -reservation.num_missing)
        reservation.num_missing = 0

    def end_probation(self, member: RoutedReplica) -> None:
        """End the probation of a replica that works."""
        member.on_probation, member.trial = False, None
        member.next_pause_s = FIRST_PAUSE_S
        self._watched_members.discard(member)

    def pause(self, member: RoutedReplica, now_s: float, *, may_be_sick: bool = True) -> float:
        """Pause a replica that failed; longer each time. Returns when the pause ends.

        A replica that was only full or slow pauses without probation, and the next pause is not
        longer.
        """
        if member.paused_until <= now_s or (may_be_sick and not member.on_probation):
            member.paused_until = now_s + member.next_pause_s
            if may_be_sick:
                member.next_pause_s = min(2 * member.next_pause_s, LONGEST_PAUSE_S)
                member.on_probation = True
            if not member.removed:
                self._watched_members.add(member)
        return member.paused_until

    def _arrange(self) -> None:
        """Count the capacity of all members again."""
        self._num_free = Counter()
        for member in self._members.values():
            info, context = member.announced.info, self._context.expected
            member.capacity = sequences_at_once(info, self._slack, context)
            self._num_free[member.announced.offer] += member.num_free
        self._min_capacity = min((routed.capacity for routed in self._members.values()), default=0)

    def _load(self, member: RoutedReplica, num_sequences: int) -> None:
        """Add outstanding sequences, or take some away."""
        previous_free = member.num_free
        member.num_outstanding += num_sequences
        if not member.removed:
            self._num_free[member.announced.offer] += member.num_free - previous_free


@dataclass(frozen=True, slots=True)
class FleetUse:
    """The use of the fleet over some batches; `services.reward.telemetry` measures it.

    Attributes:
        starved_s: seconds that the trainer waited for a batch that lacked generated groups.
        slot_seconds: slots in use, added up over them.
    """

    observed_s: float
    starved_s: float
    slot_seconds: float


def slots_needed(use: FleetUse, num_slots: int) -> float:
    """Return the slots that would keep the trainer fed, from 0 to `MAX_GROWTH` times `num_slots`.

    The work of the last batches is known: slots in use, added up over time. The trainer took them
    in the observed time, less the time that it waited for generation; had it never waited, the
    same work would have been needed in the remaining time. So

        slots = HEADROOM * used slot seconds / (observed seconds - starved seconds)

    For a trainer that never waits, with half of the slots in use, this is about half of the fleet;
    for one that waits half of its time, with all slots in use, twice the fleet. In synchronous
    mode, where generation and training take turns, the same formula makes both take equally long.

    Args:
        num_slots: of the fleet now; the result before anything was observed.
    """
    if use.observed_s <= 0.0:
        return float(num_slots)
    max_slots = MAX_GROWTH * num_slots
    fed_s = use.observed_s - use.starved_s
    wanted_slot_seconds = HEADROOM * use.slot_seconds
    return max_slots if wanted_slot_seconds >= max_slots * fed_s else wanted_slot_seconds / fed_s


def replicas_needed(slots: float, *, num_slots: int, num_replicas: int) -> int:
    """Return how many replicas of the current size have that many slots, at least 1.

    Args:
        num_slots, num_replicas: of the fleet now; 0 without one.
    """
    if num_slots <= 0 or num_replicas <= 0:
        return 1
    return max(1, math.ceil(slots * num_replicas / num_slots - _DEMAND_ROUNDING))
