"""Delivery of one version to a set of replicas: form a transfer group, stage, commit.

Consumes: a snapshot and the replicas that need it.
Waits for: an answer of each member before a group is formed, then formation, staging and commit;
    each has a deadline. A member that neither answers nor shows another sign of life is left out of
    the group, since the others would wait for it as long as a formation may take. Members may
    commit in turns, so that the others sample meanwhile.
Unblocked by: answers, deadlines, and at the first failure by leaving the epoch on both sides.
Produces: the replicas that serve the version, proven by a digest equal to ours, and those that must
    be dropped. The version that all members of the group serve is the base of the next update: if
    few bytes changed since, only these are sent.
On failure: an error in a collective shows that a member is gone, but not which one. Nothing is
    retried inside an epoch. In order, while forming or staging (`_run_jointly`, `_recover`):
    1. The first failure: a member's call or our own part of the collective ends with an error.
    2. Both sides leave the epoch: our part stops, every member gets `AbortUpdate`.
    3. All members are probed; those that do not answer are in `DeliveryResult.lost`.
    4. The delivery is not complete. `WeightPublisher.publish` drops the lost members and delivers
       to the others in the next epoch, with all bytes.
    A member that fails its commit is lost without a probe; the others serve the version, and only
    the next one is sent in a new epoch. docs/operations.md has the deadline of each step.
On shutdown: `close` leaves the group.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from services.trainer.fleet.replica_client import ReplicaClient
from sluice.concurrency.waits import deadline
from sluice.errors import InvalidRequestError, PeerError, SluiceError, WeightSyncError
from sluice.types import ReplicaInfo, TensorSpec
from sluice.weight_share import WHOLE
from sluice.weights.group import SENDER_NAME
from sluice.weights.plan import WeightBuffer
from sluice.weights.rank_sender import Changes
from sluice.weights.sender import BroadcastReport, WeightSender
from sluice.weights.snapshot import Snapshot
from sluice.weights.transfer import BaseVersion

logger = logging.getLogger(__name__)

PeerT = TypeVar("PeerT")
AnswerT = TypeVar("AnswerT")

GroupMember = ReplicaInfo | None
"""A member of a collective; ``None`` is the trainer, which sends."""

SignsOfLife = Callable[[], Mapping[str, float]]
"""Returns the time of each replica's last heartbeat, by instance id, on a monotonic clock."""

_ASKS = 2
"""Probes before a member is left out: on a loaded machine one answer may be late."""

ReadAgain = Callable[[Snapshot], AbstractContextManager[WeightBuffer | None]]
"""Opens an earlier snapshot's memory, or None if it was overwritten; see `SnapshotBuffers`."""


@dataclass(slots=True)
class PeerResults(Generic[PeerT, AnswerT]):
    """Answers and errors by peer. Every peer is in exactly one of the two."""

    answered: dict[PeerT, AnswerT] = field(default_factory=dict)
    failed: dict[PeerT, SluiceError] = field(default_factory=dict)


async def fan_out(
    peers: Iterable[PeerT],
    call: Callable[[PeerT], Awaitable[AnswerT]],
    *,
    on_failure: Callable[[], Awaitable[None]] | None = None,
    phase: str = "a joint call",
) -> PeerResults[PeerT, AnswerT]:
    """Call every peer concurrently and wait for all.

    Args:
        call: one peer's call, with its own deadline.
        on_failure: runs once, at the first failure, while other calls are still running. It must
            make them end: a collective that lost a member does not end on its own. Calls that still
            run when it returns are cancelled and count as failed.
    """
    answers: PeerResults[PeerT, AnswerT] = PeerResults()
    scopes: set[asyncio.Timeout] = set()
    first_failure = asyncio.Event()

    async def ask(peer: PeerT) -> None:
        try:
            async with asyncio.timeout(None) as scope:
                scopes.add(scope)
                answers.answered[peer] = await call(peer)
        except SluiceError as error:
            answers.failed[peer] = error
        except TimeoutError:
            name = SENDER_NAME if peer is None else str(getattr(peer, "name", peer))
            answers.failed[peer] = PeerError(name, phase, "given up: another failed")
        finally:
            scopes.discard(scope)
        if peer in answers.failed:
            first_failure.set()

    async def react(handler: Callable[[], Awaitable[None]]) -> None:
        await first_failure.wait()
        await handler()
        # Cancel only the calls that still run; their peers count as failed.
        for scope in scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async with asyncio.TaskGroup() as outer:
        reaction = outer.create_task(react(on_failure), name="on-failure") if on_failure else None
        async with asyncio.TaskGroup() as calls:
            for peer in peers:
                calls.create_task(ask(peer), name=f"call-{peer}")
        # After a failure, wait for the reaction to end instead.
        if reaction is not None and not first_failure.is_set():
            reaction.cancel()
    return answers


class DeliveryPhase(StrEnum):
    """The phases of a delivery of weights, in order."""

    FORM = "form"  # the group of replicas, if it differs from the last one
    ENCODE = "encode"  # the changes since the version that all of them serve
    STAGE = "stage"  # the transfer, while generation continues
    COMMIT = "commit"  # the swap


class DeliveryCounts:
    """Counts and seconds of all deliveries; used from one event loop.

    Each delivery sends either the changes (`sparse_bytes`) or all weights (`dense_bytes`); the
    bytes sent are the sum of the two. `whole_bytes` is the size of all weights, added at every
    delivery. Elsewhere `dense_bytes` means that size.
    """

    def __init__(self) -> None:
        self.seconds: dict[DeliveryPhase, float] = dict.fromkeys(DeliveryPhase, 0.0)
        self.failures: Counter[DeliveryPhase] = Counter()
        self.updates: Counter[str] = Counter()
        self.sparse_bytes = 0
        self.dense_bytes = 0
        self.whole_bytes = 0
        self.stall_s = 0.0

    @contextmanager
    def time_phase(self, phase: DeliveryPhase) -> Iterator[None]:
        """Add the seconds of the block to `phase`."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - began_s

    def count_failure(self, phase: DeliveryPhase) -> None:
        self.failures[phase] += 1

    def count_delivery(self, to: str, sent_bytes: int, whole_bytes: int, stall_s: float) -> None:
        """Count a version that replicas serve now.

        Args:
            to: ``fleet`` or ``newcomers``.
            sent_bytes: bytes of the broadcast, counted once for all replicas.
            whole_bytes: bytes of all weights; exceeds `sent_bytes` if only changes were sent.
            stall_s: longest time that a replica sampled no token.
        """
        self.updates[to] += 1
        self.whole_bytes += whole_bytes
        if sent_bytes < whole_bytes:
            self.sparse_bytes += sent_bytes
        else:
            self.dense_bytes += sent_bytes
        self.stall_s += stall_s


@dataclass(slots=True)
class DeliveryResult:
    """The result of one attempt.

    `served` maps replicas to seconds of stall. `lost` replicas must be dropped; `refused` ones
    permanently, since they cannot use the weights. `is_complete` is false if the version must be
    sent again. `report` describes the broadcast, if it arrived.
    """

    served: Mapping[ReplicaInfo, float] = field(default_factory=dict)
    lost: dict[ReplicaInfo, str] = field(default_factory=dict)
    refused: dict[ReplicaInfo, str] = field(default_factory=dict)
    is_complete: bool = False
    report: BroadcastReport | None = None


@dataclass(frozen=True, slots=True)
class _GroupBase:
    """The snapshot that all members of the current group serve."""

    snapshot: Snapshot
    bases: tuple[BaseVersion, ...]


class TransferSession:
    """A sender and the members of its current group.

    Args:
        sender: rank 0 of every group; closed with the session.
        next_epoch: returns rising numbers, shared by all sessions.
        leave_timeout_s: seconds that the trainer's part of a collective has to end after a failure;
            the collectives and the calls of `connect`'s clients have deadlines of their own.
        probe_timeout_s: seconds that a replica has to answer a probe.
        read: opens the snapshot that is sent; closed before replicas commit.
        read_again: opens earlier snapshots; ``None``: all weights are sent every time.
        swaps_at_once: returns how many of the members swap at the same time, at least 1.
    """

    def __init__(  # noqa: PLR0913 - everything that a delivery touches
        self,
        sender: WeightSender,
        connect: Callable[[ReplicaInfo], ReplicaClient],
        tensors: Sequence[TensorSpec],
        next_epoch: Callable[[], int],
        *,
        leave_timeout_s: float,
        probe_timeout_s: float,
        signs_of_life: SignsOfLife,
        read: Callable[[], AbstractContextManager[Snapshot]],
        read_again: ReadAgain | None,
        counts: DeliveryCounts,
        swaps_at_once: Callable[[Sequence[ReplicaInfo]], int],
    ) -> None:
        self._counts = counts
        self._swaps_at_once = swaps_at_once
        self._signs_of_life = signs_of_life
        self._read = read
        self._read_again = read_again
        self._group_base: _GroupBase | None = None
        self._sender = sender
        self._connect = connect
        self._tensors = tuple(tensors)
        self._next_epoch = next_epoch
        self._leave_timeout_s = leave_timeout_s
        self._probe_timeout_s = probe_timeout_s
        self._epoch = 0
        self._members: tuple[ReplicaInfo, ...] = ()
        self._clients: dict[ReplicaInfo, ReplicaClient] = {}

    async def deliver(self, members: tuple[ReplicaInfo, ...]) -> DeliveryResult:
        """Send a version to `members`, in a new epoch if the last one had other members."""
        delivery = DeliveryResult()
        if self._members != members:
            with self._counts.time_phase(DeliveryPhase.FORM):
                is_formed = await self._form(members, delivery)
            if not is_formed:
                self._counts.count_failure(DeliveryPhase.FORM)
                return delivery
        with self._read() as snapshot:
            # Before any member waits in a collective: encoding would use up its deadline.
            with self._counts.time_phase(DeliveryPhase.ENCODE):
                update = await self._encode_changes(snapshot)
            with self._counts.time_phase(DeliveryPhase.STAGE):
                delivery.report = await self._stage(snapshot, update, delivery)
        if delivery.report is None:
            self._counts.count_failure(DeliveryPhase.STAGE)
            return delivery
        with self._counts.time_phase(DeliveryPhase.COMMIT):
            await self._commit(delivery.report, snapshot, delivery)
        if len(delivery.served) < len(self._members):
            self._counts.count_failure(DeliveryPhase.COMMIT)
        return delivery

    def note_departure(self, replicas: Sequence[ReplicaInfo]) -> None:
        """Note that replicas join another session's group: the next delivery forms a new one."""
        if not set(replicas).isdisjoint(self._members):
            self._members = ()

    async def close(self) -> None:
        """Leave the group, close all control calls and stop listening."""
        await self._leave()
        self._sender.close()

    async def _form(self, members: tuple[ReplicaInfo, ...], delivery: DeliveryResult) -> bool:
        await self._leave()
        self._epoch = self._next_epoch()
        self._clients = {member: self._connect(member) for member in members}
        members = await self._find_living(members, delivery)
        if not members:
            await self._leave()
            return False
        keys = {member: _key(member) for member in members}
        shares = {keys[member]: member.shares or (WHOLE,) * member.ranks for member in members}
        # In a thread: it compares the shares of all workers, which takes long in a large fleet.
        specs = await asyncio.to_thread(
            self._sender.form_group, self._epoch, list(keys.values()), self._tensors, shares
        )
        answers = await self._run_jointly(
            members,
            lambda member: self._clients[member].join(specs[keys[member]]),
            self._sender.join,
            phase := f"forming the group of epoch {self._epoch}",
        )
        if answers.failed:
            await self._recover(members, answers, delivery, phase)
            return False
        self._members = members
        return True

    async def _find_living(
        self, members: tuple[ReplicaInfo, ...], delivery: DeliveryResult
    ) -> tuple[ReplicaInfo, ...]:
        """Return the members that answer a probe or send a heartbeat meanwhile; drop the others."""
        signs_before: Mapping[str, float] = {}
        silent = members
        for _ in range(_ASKS):
            # Read again each time: a heartbeat from before the silence may arrive during the first.
            signs_before = self._signs_of_life()
            probes = await self._probe(silent)
            silent = tuple(probes.failed)
            if not silent:
                return members
        signs_after = self._signs_of_life()
        for member in silent:
            key = member.instance_id
            if key in signs_after and signs_after[key] != signs_before.get(key):
                logger.info(
                    "%s answers no probe but sends heartbeats: it stays in the group", member.name
                )
                continue
            delivery.lost[member] = (
                f"silent when the group of epoch {self._epoch} was to be formed: "
                f"{probes.failed[member]}"
            )
        return tuple(member for member in members if member not in delivery.lost)

    async def _probe(self, members: Sequence[ReplicaInfo]) -> PeerResults[ReplicaInfo, None]:
        return await fan_out(
            members, lambda member: self._clients[member].probe(self._probe_timeout_s)
        )

    async def _stage(
        self, snapshot: Snapshot, update: Changes | None, delivery: DeliveryResult
    ) -> BroadcastReport | None:
        members, version = self._members, snapshot.version
        reports: list[BroadcastReport] = []
        digests: dict[ReplicaInfo, str] = {}

        async def receive(member: ReplicaInfo) -> None:
            digests[member] = await self._clients[member].stage(self._epoch, version)

        def send(stop: threading.Event) -> None:
            reports.append(self._sender.broadcast(snapshot.weights, version, stop, update))

        phase = f"staging version {version}"
        answers = await self._run_jointly(members, receive, send, phase)
        if reports:
            _compare(digests, reports[0].digests, answers, delivery)
        if answers.failed:
            await self._recover(members, answers, delivery, phase)
            return None
        return reports[0]

    async def _encode_changes(self, snapshot: Snapshot) -> Changes | None:
        """Encode the changes since the version that all members serve, if that saves bytes."""
        base, read_again = self._group_base, self._read_again
        if base is None or read_again is None:
            return None
        stop = threading.Event()

        def encode() -> Changes | None:
            with read_again(base.snapshot) as old:
                if old is None:
                    return None
                return self._sender.encode_update(
                    base.bases, old, snapshot.weights, stop, snapshot.version
                )

        try:
            return await asyncio.to_thread(encode)
        finally:
            stop.set()  # a cancelled delivery must not leave the thread behind

    async def _commit(
        self, report: BroadcastReport, snapshot: Snapshot, delivery: DeliveryResult
    ) -> None:
        version, digests = report.version, report.digests
        # A replica whose turn comes late serves the version before meanwhile. One that dies in its
        # turn ends it by the deadline of its call.
        turns = asyncio.Semaphore(self._swaps_at_once(self._members))

        async def swap(member: ReplicaInfo) -> float:
            async with turns:
                digest = digests[_key(member)]
                return await self._clients[member].commit(self._epoch, version, digest)

        answers = await fan_out(self._members, swap)
        delivery.lost.update({member: str(error) for member, error in answers.failed.items()})
        delivery.served, delivery.is_complete = answers.answered, True
        # A delta needs the same base on all members; after a failed commit one may differ.
        self._group_base = None if answers.failed else _GroupBase(snapshot, report.bases)

    async def _run_jointly(
        self,
        members: tuple[ReplicaInfo, ...],
        call: Callable[[ReplicaInfo], Awaitable[None]],
        send: Callable[[threading.Event], None],
        phase: str,
    ) -> PeerResults[GroupMember, None]:
        """Enter a collective with all members; one failure ends it for all.

        Args:
            call: a member's part: the call that makes it enter.
            send: our part, in a thread; it ends soon after its argument is set.
        """
        stop, own_part_ended = threading.Event(), asyncio.Event()

        async def enter(member: GroupMember) -> None:
            if member is not None:
                await call(member)
                return
            try:
                await asyncio.to_thread(send, stop)
            finally:
                own_part_ended.set()

        async def end_for_all() -> None:
            stop.set()
            self._sender.abandon("a member failed")
            await self._abort(members)
            async with deadline(
                self._leave_timeout_s, peer="trainer", phase="leaving a failed epoch"
            ):
                await own_part_ended.wait()

        try:
            return await fan_out((None, *members), enter, on_failure=end_for_all, phase=phase)
        finally:
            stop.set()  # a cancelled delivery must not leave the sending thread behind

    async def _abort(self, members: Sequence[ReplicaInfo]) -> None:
        epoch = self._epoch
        await fan_out(members, lambda member: self._clients[member].abort(epoch, "a member failed"))

    async def _recover(
        self,
        members: tuple[ReplicaInfo, ...],
        answers: PeerResults[GroupMember, None],
        delivery: DeliveryResult,
        phase: str,
    ) -> None:
        """Find the members that are gone, and end the group.

        Raises:
            WeightSyncError, DeadlineError: a trainer rank is gone, which ends the run.
        """
        for peer, error in answers.failed.items():
            logger.warning("%s: %s: %s", phase, peer.name if peer else "trainer", error)
            if peer is not None and isinstance(error, InvalidRequestError):
                delivery.refused[peer] = f"refused while {phase}: {error}"
        probes = await self._probe(members)
        for member, silent in probes.failed.items():
            delivery.lost[member] = f"silent after a failure while {phase}: {silent}"
        await self._leave()
        await asyncio.to_thread(self._sender.probe_others, self._probe_timeout_s)

    async def _leave(self) -> None:
        self._sender.abandon("the group is over")
        async with AsyncExitStack() as stack:
            for client in self._clients.values():
                stack.push_async_callback(client.close)
        self._members, self._clients, self._group_base = (), {}, None


def _key(member: ReplicaInfo) -> str:
    """Return a member's name within its group."""
    return f"{member.name}/{member.instance_id}"


def _compare(
    digests: Mapping[ReplicaInfo, str],
    sent: Mapping[str, str],
    answers: PeerResults[GroupMember, None],
    delivery: DeliveryResult,
) -> None:
    """Count members whose digest differs from the sent one as failed, although they answered."""
    for member, digest in digests.items():
        if digest != (ours := sent[_key(member)]):
            error = WeightSyncError(member.name, "stage", f"its digest is {digest}, ours {ours}")
            answers.failed[member] = error
            delivery.lost[member] = str(error)
