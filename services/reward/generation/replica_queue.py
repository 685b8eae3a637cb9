"""The fleet of replicas, and the groups that wait for capacity: validation before training, then in
order of issue."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from sluice.algorithm.routing import (
    AnnouncedReplica,
    ReplicaOffer,
    ReplicaRequirement,
    ReplicaRouter,
    Reservation,
    RoutedReplica,
)
from sluice.concurrency.waits import ChangeSignal, waiting_for
from sluice.errors import ValidationFailedError

_TIMER_SLACK_S = 0.001


@dataclass(slots=True, eq=False)
class _QueuedGroup:
    order: tuple[bool, int]
    requirement: ReplicaRequirement
    reserved: asyncio.Future[Reservation]


class ReplicaQueue:
    """The fleet and the groups that wait for it.

    Args:
        slack: most sequences in flight per slot.

    Attributes:
        fleet: the announced replicas and their used capacity.
        capacity: notified when there may be capacity for more.
    """

    def __init__(self, slack: float) -> None:
        self.fleet = ReplicaRouter(slack)
        self.capacity = ChangeSignal()
        self._waiters: list[_QueuedGroup] = []

    @property
    def num_waiting(self) -> int:
        """Groups without a replica."""
        return len(self._waiters)

    @property
    def is_busy(self) -> bool:
        """Whether a replica has a sequence, or a group waits for one."""
        return bool(self._waiters) or self.fleet.has_sequences

    def num_free_sequences(self, lowest_version: int, group_size: int = 1) -> int:
        """Return how many more sequences could start now, beyond those that already wait; 0 or less
        for none.

        A validation on held replicas takes no capacity from training. An idle replica has capacity
        for at least one group of `group_size` sequences.
        """
        free = self.fleet.num_free(lowest_version, time.monotonic(), group_size)
        if free <= 0 or not self._waiters:
            return free
        training = ReplicaRequirement(1, lowest_version)
        return free - sum(
            waiter.requirement.num_sequences for waiter in self._competing_groups(training)
        )

    def announce(self, replicas: Sequence[AnnouncedReplica]) -> None:
        """Replace the fleet; mark members that are gone as removed."""
        self.fleet.announce(replicas)
        self._capacity_changed()

    def may_validate(self, version: int) -> bool:
        """Return whether a replica, busy or paused, serves validations of `version`."""
        requirement = ReplicaRequirement(1, version, version)
        return any(requirement.takes(offer) for offer in self.fleet.offers)

    async def reserve(
        self, requirement: ReplicaRequirement, order: tuple[bool, int]
    ) -> Reservation:
        """Reserve capacity on a replica; the caller gives it back. The lowest `order` is first.

        Raises:
            ValidationFailedError: no replica may validate the wanted version, and none will.
        """
        reserved: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _QueuedGroup(order, requirement, reserved)
        insort(self._waiters, waiter, key=attrgetter("order"))
        self._serve()
        try:
            with waiting_for("rollout fleet", "freeing capacity for a group"):
                return await reserved
        except asyncio.CancelledError:
            if reserved.done() and not reserved.cancelled() and not reserved.exception():
                self.fleet.give_back(reserved.result())
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._capacity_changed()
            raise

    def give_back(self, reservation: Reservation) -> None:
        """Release the capacity that is left of a reservation."""
        self.fleet.give_back(reservation)
        self._capacity_changed()

    def note_answer(self, member: RoutedReplica) -> None:
        """Note that a replica accepted a stream. This ends its probation, if its pause has ended.

        During the pause the stream may have begun before the failure, and proves nothing.
        """
        if member.on_probation and member.paused_until <= time.monotonic():
            self.fleet.end_probation(member)
            self._capacity_changed()

    def release_sequences(self, reservation: Reservation, count: int) -> None:
        """Give back the capacity of finished sequences."""
        self.fleet.release_sequences(reservation, count)
        self._capacity_changed()

    def has_other_capacity(self, member: RoutedReplica, requirement: ReplicaRequirement) -> bool:
        """Return whether another replica than `member` would take the group at once."""
        if next(self._competing_groups(requirement), None) is not None:
            return False
        # Paused for this question only, so that the router ignores it.
        paused_until, member.paused_until = member.paused_until, math.inf
        try:
            return self.fleet.choose(requirement, time.monotonic()) is not None
        finally:
            member.paused_until = paused_until

    def _competing_groups(self, requirement: ReplicaRequirement) -> Iterator[_QueuedGroup]:
        """Yield the waiting groups that compete with `requirement` for a replica."""
        offers = [offer for offer in self.fleet.offers if requirement.takes(offer)]
        for waiter in self._waiters:
            if any(waiter.requirement.takes(offer) for offer in offers):
                yield waiter

    def pause(self, member: RoutedReplica, *, may_be_sick: bool = True) -> None:
        """Avoid a replica that failed, until the next announcement or the end of a pause."""
        now_s = time.monotonic()
        until = self.fleet.pause(member, now_s, may_be_sick=may_be_sick)
        asyncio.get_running_loop().call_later(
            until - now_s + _TIMER_SLACK_S, self._capacity_changed
        )

    def _capacity_changed(self) -> None:
        if self._waiters:
            self._serve()
        self.capacity.notify()

    def _serve(self) -> None:
        """Reserve capacity for waiting groups in order.

        A group overtakes an earlier one only on a replica that the earlier one cannot use.
        """
        now_s, offers = time.monotonic(), self.fleet.offers
        still_waiting: list[_QueuedGroup] = []
        taken_offers: set[ReplicaOffer] = set()
        for place, waiter in enumerate(self._waiters):
            requirement = waiter.requirement
            if len(taken_offers) == len(offers) and requirement.highest_version is None:
                # All that follow are for training, too. Thousands may wait, and each end of a
                # sequence comes here.
                still_waiting += self._waiters[place:]
                break
            is_served = len(taken_offers) < len(offers) and not waiter.reserved.done()
            member = self.fleet.choose(requirement, now_s, taken_offers) if is_served else None
            if member is not None:
                waiter.reserved.set_result(
                    self.fleet.reservation(member, requirement.num_sequences)
                )
                continue
            taken_offers.update(offer for offer in offers if requirement.takes(offer))
            if not waiter.reserved.done() and requirement.is_unservable(offers):
                waiter.reserved.set_exception(_no_replica(requirement))
                continue
            still_waiting.append(waiter)
        self._waiters = still_waiting


def _no_replica(requirement: ReplicaRequirement) -> ValidationFailedError:
    return ValidationFailedError(
        f"validating version {requirement.highest_version}: no replica that serves it is left; the "
        "others have, or are about to get, another version"
    )
