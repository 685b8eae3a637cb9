"""Publishing: bring every replica to the same version, or drop the replica.

Consumes: a frozen version (`SnapshotBuffers`) and the fleet's members.
Waits for: deliveries (`fleet.delivery`); each phase of one has a deadline. A version is frozen
    when no newcomer reads the memory that it takes.
Unblocked by: answers, deadlines and failures of members.
Produces: replicas marked as serving the version.
On failure: members that are silent, hold other weights or refuse them are dropped, and everything
    is sent again in the next epoch. If that fails too although all answer, each member gets the
    version in its own group, and one that cannot take it there is dropped.
On shutdown: `close` leaves the group.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from services.trainer.fleet.delivery import DeliveryCounts, DeliveryResult, TransferSession
from services.trainer.fleet.members import Fleet, FleetMember, MemberState
from services.trainer.fleet.replica_client import ReplicaClient
from sluice.concurrency.waits import waiting_for
from sluice.errors import SluiceError, WeightSyncError
from sluice.types import ReplicaInfo, TensorSpec
from sluice.weights.sender import WeightSender
from sluice.weights.snapshot import Snapshot, SnapshotBuffers

logger = logging.getLogger(__name__)

_JOINT_ATTEMPTS = 3  # each in a new epoch with the remaining members; no call is repeated


@dataclass(frozen=True, slots=True)
class PublishReport:
    """A published version. `stall_s` is the longest time that a replica sampled no token.

    `sent_bytes` counts the broadcast that arrived; `dense_bytes` is the size of all weights. Both
    are 0 if the version was sent to each replica alone. `rank_bytes` are those of each trainer rank
    that sends.
    """

    replicas: int
    attempts: int
    seconds: float
    stall_s: float
    sent_bytes: int = 0
    dense_bytes: int = 0
    rank_bytes: tuple[int, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """Return its seconds, and the bytes on the wire if they were sent in one broadcast."""
        times = {
            "weights/stall_s": self.stall_s,
            "timing_s/reshard": self.stall_s,
            "weights/delivery_s": self.seconds,
        }
        if not self.dense_bytes:
            return times
        return {
            **times,
            "weights/bytes_sent": float(self.sent_bytes),
            "weights/bytes_share": self.sent_bytes / self.dense_bytes,
        }


class WeightPublisher:
    """The sender of versions to the fleet and to newcomers.

    Args:
        make_sender: makes rank 0 of new groups, with its own rendezvous store.
        connect: makes the client of a replica, whose calls have deadlines.
        timeout_s: `TransferSession`'s `leave_timeout_s`.
        swaps_at_once: returns how many of a number of replicas swap at the same time; by default
            all of them. Replicas that serve nothing yet always swap together.
    """

    def __init__(  # noqa: PLR0913 - everything that a session needs
        self,
        fleet: Fleet,
        snapshots: SnapshotBuffers,
        tensors: Sequence[TensorSpec],
        *,
        make_sender: Callable[[], WeightSender],
        connect: Callable[[ReplicaInfo], ReplicaClient],
        timeout_s: float,
        probe_timeout_s: float,
        sends_changes: bool = True,
        counts: DeliveryCounts | None = None,
        swaps_at_once: Callable[[int], int] = int,
    ) -> None:
        self._counts = counts or DeliveryCounts()
        self._fleet = fleet
        self._snapshots = snapshots
        self._make_sender = make_sender
        self._connect = connect
        self._swaps_at_once = swaps_at_once
        self._new_session = partial(
            TransferSession,
            connect=connect,
            tensors=tensors,
            next_epoch=partial(next, itertools.count(1)),
            leave_timeout_s=timeout_s,
            probe_timeout_s=probe_timeout_s,
            signs_of_life=self._last_heartbeats,
            read_again=snapshots.read_again if sends_changes else None,
            counts=self._counts,
        )
        self._main = self._new_session(
            make_sender(), read=snapshots.read, swaps_at_once=self._num_per_turn
        )
        # Instance ids of replicas in a running delivery or waiting for one: a replica is in one
        # group at a time. A replica that returns while it waits may be here twice.
        self._busy = Counter[str]()
        self._published = -1
        # The version being sent to newcomers, and the event of its end.
        self._seeding: tuple[int, asyncio.Event] | None = None

    async def publish(self, version: int) -> PublishReport:
        """Send the frozen `version` to all members that are not being seeded.

        A delivery that is not complete has found who is gone; the next one, in a new epoch, goes to
        the members that remain.

        Raises:
            WeightSyncError: no member could receive it.
        """
        began_s = time.monotonic()
        for attempt in itertools.count(1):
            members = self._idle_members(MemberState.PENDING, MemberState.SERVING)
            if not members:
                self._published = version
                return PublishReport(0, attempt, time.monotonic() - began_s, 0.0)
            if attempt <= _JOINT_ATTEMPTS:
                delivery = await self._deliver(self._main, members)
            else:
                delivery = await self._deliver_one_by_one(members)
            if delivery.is_complete:
                self._published = version
                seconds = time.monotonic() - began_s
                stall_s = max(delivery.served.values(), default=0.0)
                sent, dense = _num_bytes(delivery)
                served = len(delivery.served)
                ranks = delivery.report.rank_bytes if delivery.report else ()
                return PublishReport(served, attempt, seconds, stall_s, sent, dense, ranks)
        raise AssertionError("counting has no end")

    async def wait_for_free_snapshot(self) -> None:
        """Wait until no newcomer is receiving the version before the newest.

        The next version takes its memory. The deadline of the transfer ends a newcomer that hangs.
        """
        if self._seeding is not None and self._seeding[0] != self._snapshots.version:
            with waiting_for("newcomers", "receiving the version that the next one overwrites"):
                await self._seeding[1].wait()

    async def seed_newcomers(self) -> None:
        """Send the newest version to pending replicas in their own group.

        After some failed attempts they are dropped; they register again as newcomers. Those that
        got a version each time, but each time later than a newer one was frozen, serve what they
        have: the next version is published to them too.
        """
        if self._snapshots.version is None:
            return
        newcomers: tuple[ReplicaInfo, ...] = ()
        delivery = DeliveryResult()
        for _ in range(_JOINT_ATTEMPTS):
            newcomers = self._newcomers()
            if not newcomers:
                return
            session = self._new_session(
                self._make_sender(), read=self._read_for_newcomers, swaps_at_once=len
            )
            try:
                delivery = await self._deliver(session, newcomers)
            finally:
                await session.close()
        for info in set(newcomers) & set(self._idle_members(MemberState.PENDING)):
            if delivery.report is not None and info in delivery.served:
                self._fleet.mark_serving(info, delivery.report.version)
            else:
                self._fleet.expel(info, f"did not get the weights in {_JOINT_ATTEMPTS} epochs")

    def _newcomers(self) -> tuple[ReplicaInfo, ...]:
        """Return pending replicas, and those that serve an older version if none is left that
        serves the published one: no batch may come without it, and so no next version."""
        members = self._fleet.members()
        if any(_serves(member, self._published) for member in members):
            return self._idle_members(MemberState.PENDING)
        return self._idle_members(MemberState.PENDING, MemberState.SERVING)

    async def sleep_replicas(self) -> None:
        """Let all replicas free the memory of devices that they share, until the next version.

        A replica that does not is no error: the next delivery finds out whether it still answers.
        """
        async with asyncio.TaskGroup() as tasks:
            for info in self._idle_members(MemberState.SERVING):
                tasks.create_task(self._sleep(info), name=f"sleep of {info.name}")

    async def _sleep(self, info: ReplicaInfo) -> None:
        client = self._connect(info)
        try:
            if not await client.sleep():
                logger.warning("%s: its engine cannot sleep and keeps its memory", info.name)
        except SluiceError as error:
            logger.warning("%s does not sleep and may keep its memory: %s", info.name, error)
        finally:
            await client.close()

    async def close(self) -> None:
        """Leave the group and close all control calls."""
        await self._main.close()

    @contextmanager
    def _read_for_newcomers(self) -> Iterator[Snapshot]:
        with self._snapshots.read() as snapshot:
            self._seeding = (snapshot.version, has_ended := asyncio.Event())
            try:
                yield snapshot
            finally:
                self._seeding = None
                has_ended.set()

    def _num_per_turn(self, members: Sequence[ReplicaInfo]) -> int:
        """Return how many of `members` swap at the same time."""
        serving = set(self._fleet.in_state(MemberState.SERVING))
        if serving.isdisjoint(members):
            return len(members)
        return self._swaps_at_once(len(members))

    def _last_heartbeats(self) -> dict[str, float]:
        return {member.info.instance_id: member.last_seen_s for member in self._fleet.members()}

    def _idle_members(self, *states: MemberState) -> tuple[ReplicaInfo, ...]:
        members = self._fleet.in_state(*states)
        return tuple(info for info in members if not self._busy[info.instance_id])

    async def _deliver(
        self, session: TransferSession, members: tuple[ReplicaInfo, ...]
    ) -> DeliveryResult:
        if session is not self._main:
            self._main.note_departure(members)
        with self._mark_busy(members):
            delivery = await session.deliver(members)
        if delivery.served:
            to = "fleet" if session is self._main else "newcomers"
            stall_s = max(delivery.served.values())
            self._counts.count_delivery(to, *_num_bytes(delivery), stall_s)
        for info, reason in delivery.refused.items():
            self._fleet.refuse(info, reason)
        for info, reason in delivery.lost.items():
            self._fleet.expel(info, reason)
        # A newcomer stays pending if a newer version was frozen meanwhile.
        if delivery.report is not None and delivery.report.version == self._snapshots.version:
            for info in delivery.served:
                self._fleet.mark_serving(info, delivery.report.version)
        return delivery

    async def _deliver_one_by_one(self, members: tuple[ReplicaInfo, ...]) -> DeliveryResult:
        """Send to each member separately.

        All members answer, but one cannot receive weights; this finds it.
        """
        logger.warning("%d epochs failed; now sending to each replica alone", _JOINT_ATTEMPTS)
        served: dict[ReplicaInfo, float] = {}
        with self._mark_busy(members):  # also those that wait for their turn
            for info in members:
                delivery = await self._deliver(self._main, (info,))
                served.update(delivery.served)
                if not delivery.served:
                    self._fleet.expel(info, "could not take the weights in a group of its own")
        if not served:
            names = ", ".join(info.name for info in members)
            raise WeightSyncError(names, "publish", "none could take the weights")
        return DeliveryResult(served, is_complete=True)

    @contextmanager
    def _mark_busy(self, members: tuple[ReplicaInfo, ...]) -> Iterator[None]:
        instance_ids = Counter(info.instance_id for info in members)
        self._busy.update(instance_ids)
        try:
            yield
        finally:
            self._busy -= instance_ids  # a Counter keeps no zeros


def _serves(member: FleetMember, version: int) -> bool:
    return member.state is MemberState.SERVING and member.version >= version


def _num_bytes(delivery: DeliveryResult) -> tuple[int, int]:
    """Return the bytes sent and the bytes of all weights of a delivery's broadcast."""
    report = delivery.report
    return (0, 0) if report is None else (report.sent_bytes, report.dense_bytes)
