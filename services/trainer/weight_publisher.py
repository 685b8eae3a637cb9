"""Brings every replica to the same version, or drops the replica.

Consumes: a frozen version (`SnapshotBuffers`) and the fleet's members.
Waits for: formation, staging and commit of each member; each phase has a deadline.
Unblocked by: answers, deadlines, and at the first failure by abandoning the epoch on both sides.
Produces: replicas marked as serving the version, with a digest equal to ours.
On failure: an error in a collective says that *someone* is gone, not who; all members are probed,
    the silent ones are dropped, and everything is sent again in the next epoch. Nothing is retried
    inside an epoch.
On shutdown: `close` leaves the groups.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from services.trainer.fan_out import Answers, fan_out
from services.trainer.fleet import Fleet, MemberState
from services.trainer.replica_client import ReplicaClient
from sluice.errors import WeightSyncError
from sluice.types import ReplicaInfo, TensorSpec
from sluice.weights.sender import BroadcastReport, WeightSender
from sluice.weights.snapshot import Snapshot, SnapshotBuffers

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One version is served. `stall_s` is the longest time any replica drew no token."""

    version: int
    replicas: int
    attempts: int
    seconds: float
    stall_s: float


@dataclass(slots=True)
class _Lane:
    """A sender and the members of its current group."""

    sender: WeightSender
    epoch: int = 0
    members: tuple[ReplicaInfo, ...] = ()
    clients: dict[ReplicaInfo, ReplicaClient] = field(default_factory=dict)


class WeightPublisher:
    """Publishes versions to the fleet and seeds newcomers.

    Args:
        fleet: who is there.
        snapshots: where frozen versions are.
        tensors: the weights as they travel.
        make_sender: a new rank 0 with its own rendezvous store.
        connect: opens the control calls to a replica.
        probe_timeout_s: seconds a replica has to answer after a failure.
    """

    def __init__(
        self,
        fleet: Fleet,
        snapshots: SnapshotBuffers,
        tensors: Sequence[TensorSpec],
        *,
        make_sender: Callable[[], WeightSender],
        connect: Callable[[ReplicaInfo], ReplicaClient],
        probe_timeout_s: float,
    ) -> None:
        self._fleet, self._snapshots, self._tensors = fleet, snapshots, tuple(tensors)
        self._make_sender, self._connect = make_sender, connect
        self._probe_timeout_s = probe_timeout_s
        self._epochs = itertools.count(1)
        self._main = _Lane(make_sender())
        self._seeding: set[str] = set()

    async def publish(self, version: int) -> PublishReport:
        """Sends the frozen `version` to all members that are not being seeded at the moment.

        Raises:
            WeightSyncError: no attempt succeeded although the members answer probes.
        """
        began_s = time.monotonic()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            members = self._publishable()
            if not members:
                return PublishReport(version, 0, attempt, time.monotonic() - began_s, 0.0)
            with self._snapshots.read() as snapshot:
                stall_s = await self._deliver(self._main, members, snapshot)
            if stall_s is not None:
                seconds = time.monotonic() - began_s
                return PublishReport(version, len(members), attempt, seconds, stall_s)
        names = ", ".join(member.name for member in members)
        raise WeightSyncError(names, "publish", f"{_MAX_ATTEMPTS} epochs failed in a row")

    async def seed_newcomers(self) -> None:
        """Sends the newest version to pending replicas in a group of their own."""
        if self._snapshots.version is None:
            return
        newcomers = tuple(
            info
            for info in self._fleet.in_state(MemberState.PENDING)
            if info.incarnation not in self._seeding
        )
        if not newcomers:
            return
        self._seeding.update(info.incarnation for info in newcomers)
        lane = _Lane(self._make_sender())
        try:
            with self._snapshots.read() as snapshot:
                await self._deliver(lane, newcomers, snapshot)
        finally:
            self._seeding.difference_update(info.incarnation for info in newcomers)
            await self._leave(lane)
            lane.sender.close()

    async def close(self) -> None:
        """Leaves the group and closes all control calls."""
        await self._leave(self._main)
        self._main.sender.close()

    def _publishable(self) -> tuple[ReplicaInfo, ...]:
        members = self._fleet.in_state(MemberState.PENDING, MemberState.SERVING)
        return tuple(info for info in members if info.incarnation not in self._seeding)

    async def _deliver(
        self, lane: _Lane, members: tuple[ReplicaInfo, ...], snapshot: Snapshot
    ) -> float | None:
        """Stages and commits; the longest stall, or ``None`` when the epoch failed."""
        if lane.members != members and not await self._form(lane, members):
            return None
        report = await self._stage(lane, snapshot)
        if report is None:
            return None
        return await self._commit(lane, snapshot.version, report.digest)

    async def _form(self, lane: _Lane, members: tuple[ReplicaInfo, ...]) -> bool:
        await self._leave(lane)
        lane.epoch = next(self._epochs)
        lane.clients = {member: self._connect(member) for member in members}
        keys = {member: f"{member.name}/{member.incarnation}" for member in members}
        specs = lane.sender.form_group(lane.epoch, list(keys.values()), self._tensors)
        stop = threading.Event()

        async def join(member: ReplicaInfo | None) -> None:
            if member is None:
                await asyncio.to_thread(lane.sender.join, stop)
            else:
                await lane.clients[member].join(specs[keys[member]])

        answers = await self._together(lane, members, join, stop)
        if answers.failed:
            await self._recover(lane, members, answers, "forming the group")
            return False
        lane.members = members
        return True

    async def _stage(self, lane: _Lane, snapshot: Snapshot) -> BroadcastReport | None:
        members, version = lane.members, snapshot.version
        stop = threading.Event()
        reports: list[BroadcastReport] = []
        digests: dict[ReplicaInfo, str] = {}

        async def move(member: ReplicaInfo | None) -> None:
            if member is None:
                send = lane.sender.broadcast
                reports.append(await asyncio.to_thread(send, snapshot.weights, version, stop))
            else:
                digests[member] = await lane.clients[member].stage(lane.epoch, version)

        answers = await self._together(lane, members, move, stop)
        if reports:
            for member in members:
                if digests.get(member, reports[0].digest) != reports[0].digest:
                    error = WeightSyncError(member.name, "stage", "the digest differs from ours")
                    answers.failed[member] = error
                    self._fleet.expel(member, str(error))
        if answers.failed:
            await self._recover(lane, members, answers, f"staging version {version}")
            return None
        return reports[0]

    async def _commit(self, lane: _Lane, version: int, digest: str) -> float:
        answers = await fan_out(
            lane.members, lambda member: lane.clients[member].commit(lane.epoch, version, digest)
        )
        for member, error in answers.failed.items():
            self._fleet.expel(member, str(error))
        newest = self._snapshots.version
        for member in answers.answered:
            if version == newest:
                self._fleet.mark_serving(member, version)
        return max(answers.answered.values(), default=0.0)

    async def _together(
        self,
        lane: _Lane,
        members: tuple[ReplicaInfo, ...],
        call: Callable[[ReplicaInfo | None], object],
        stop: threading.Event,
    ) -> Answers[ReplicaInfo | None, None]:
        """Ourselves (None) and all members enter a collective; one failure ends it for all."""

        async def end_it() -> None:
            stop.set()
            lane.sender.abandon("a member failed")
            await self._abort(lane, members)

        try:
            return await fan_out((None, *members), call, on_failure=end_it)  # type: ignore[arg-type]
        finally:
            stop.set()  # a cancelled publish must not leave the sending thread behind

    async def _abort(self, lane: _Lane, members: Sequence[ReplicaInfo]) -> None:
        epoch = lane.epoch
        await fan_out(members, lambda member: lane.clients[member].abort(epoch, "a member failed"))

    async def _recover(
        self,
        lane: _Lane,
        members: tuple[ReplicaInfo, ...],
        answers: Answers[ReplicaInfo | None, None],
        phase: str,
    ) -> None:
        """Finds out who is gone and drops them; the lane's group is over."""
        for peer, error in answers.failed.items():
            logger.warning("%s: %s: %s", phase, peer.name if peer else "trainer", error)
        probes = await fan_out(
            members, lambda member: lane.clients[member].probe(self._probe_timeout_s)
        )
        for member, silent in probes.failed.items():
            self._fleet.expel(member, f"silent after a failure while {phase}: {silent}")
        await self._leave(lane)

    async def _leave(self, lane: _Lane) -> None:
        lane.sender.abandon("the group is over")
        async with AsyncExitStack() as stack:
            for client in lane.clients.values():
                stack.push_async_callback(client.close)
        lane.members, lane.clients = (), {}
