"""Queue groups for capacity on a replica: validation before training, then in order of issue."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sluice.algorithm.routing import (
    AnnouncedReplica,
    ReplicaRequirement,
    ReplicaRouter,
    Reservation,
    RoutedReplica,
)
from sluice.concurrency.waits import waiting_for

_TIMER_SLACK_S = 0.001


@dataclass(slots=True, eq=False)
class _QueuedGroup:
    rank: tuple[bool, int]
    wanted: ReplicaRequirement
    reserved: asyncio.Future[Reservation]


class ReplicaQueue:
    """The fleet and the groups that wait for it.

    Args:
        slack: sequences in flight per slot, at most.
        on_capacity: called when there may be capacity for more.
    """

    def __init__(self, slack: float, on_capacity: Callable[[], None]) -> None:
        self._fleet = ReplicaRouter(slack)
        self._on_capacity = on_capacity
        self._waiters: list[_QueuedGroup] = []

    @property
    def replicas(self) -> tuple[AnnouncedReplica, ...]:
        """The announced replicas."""
        return self._fleet.announced

    @property
    def num_waiting(self) -> int:
        """Groups without a replica."""
        return len(self._waiters)

    @property
    def num_slots_in_use(self) -> int:
        """Slots of announced replicas with a sequence of ours in them."""
        return self._fleet.num_slots_in_use

    def num_free_sequences(self, lowest_version: int) -> int:
        """Return how many sequences could start now, less those that wait for a replica already."""
        free = self._fleet.num_free(lowest_version, time.monotonic())
        if not self._waiters:
            return free
        return free - sum(waiter.wanted.num_sequences for waiter in self._waiters)

    def announce(self, replicas: Sequence[AnnouncedReplica]) -> None:
        """Replace the fleet; members that are gone are marked as removed."""
        self._fleet.announce(replicas)
        self._capacity_changed()

    async def reserve(self, wanted: ReplicaRequirement, rank: tuple[bool, int]) -> Reservation:
        """Reserve capacity on a replica; the caller gives it back. The lowest `rank` is first."""
        reserved: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _QueuedGroup(rank, wanted, reserved)
        self._waiters.append(waiter)
        self._waiters.sort(key=lambda other: other.rank)
        self._serve()
        try:
            with waiting_for("rollout fleet", "freeing capacity for a group"):
                return await reserved
        except asyncio.CancelledError:
            if reserved.done() and not reserved.cancelled():
                self._fleet.give_back(reserved.result())
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._capacity_changed()
            raise

    def give_back(self, reservation: Reservation) -> None:
        """Release the capacity that is left of a reservation."""
        self._fleet.give_back(reservation)
        self._capacity_changed()

    def answered(self, member: RoutedReplica) -> None:
        """Note that a replica works, which ends its probation."""
        if member.on_probation:
            self._fleet.answered(member)
            self._capacity_changed()

    def sequences_ended(self, reservation: Reservation, count: int) -> None:
        """Give back the capacity of finished sequences."""
        for _ in range(count):
            self._fleet.sequence_ended(reservation)
        self._capacity_changed()

    def has_capacity_beside(self, member: RoutedReplica, wanted: ReplicaRequirement) -> bool:
        """Return whether another replica than `member` would take the group at once."""
        if self._waiters:
            return False
        # Paused for the time of this question, so that the router looks past it.
        paused_until, member.paused_until = member.paused_until, math.inf
        try:
            return self._fleet.choose(wanted, time.monotonic()) is not None
        finally:
            member.paused_until = paused_until

    def pause(self, member: RoutedReplica) -> None:
        """Avoid a replica that failed, until the next announcement or the end of a pause."""
        now = time.monotonic()
        until = self._fleet.failed(member, now)
        asyncio.get_running_loop().call_later(until - now + _TIMER_SLACK_S, self._capacity_changed)

    def _capacity_changed(self) -> None:
        self._serve()
        self._on_capacity()

    def _serve(self) -> None:
        """Reserve capacity in order. A group overtakes another only if that one waits for a version
        that no replica serves."""
        now = time.monotonic()
        still_waiting: list[_QueuedGroup] = []
        blocked = False
        for waiter in self._waiters:
            member = None if blocked else self._fleet.choose(waiter.wanted, now)
            if member is not None and not waiter.reserved.done():
                waiter.reserved.set_result(
                    self._fleet.reservation(member, waiter.wanted.num_sequences)
                )
                continue
            blocked = blocked or self._fleet.serves(waiter.wanted)
            still_waiting.append(waiter)
        self._waiters = still_waiting
