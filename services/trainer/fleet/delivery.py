"""The same call to many peers at once, with each one's answer or error."""

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
from typing import Generic, Protocol, TypeVar

from sluice.concurrency.deadlines import deadline
from sluice.errors import InvalidRequestError, PeerError, SluiceError, WeightSyncError
from sluice.types import ReplicaInfo, TensorSpec, TransferGroupSpec
from sluice.weights.plan import WeightBuffer
from sluice.weights.sender import BroadcastReport, WeightSender
from sluice.weights.snapshot import Snapshot
from sluice.weights.sparse_update import SparseUpdate
from sluice.weights.transfer import Base

PeerT = TypeVar("PeerT")
AnswerT = TypeVar("AnswerT")


@dataclass(slots=True)
class Answers(Generic[PeerT, AnswerT]):
    """Who answered what, and who failed how. Every peer is in exactly one of the two."""

    answered: dict[PeerT, AnswerT] = field(default_factory=dict)
    failed: dict[PeerT, SluiceError] = field(default_factory=dict)


async def fan_out(
    peers: Iterable[PeerT],
    call: Callable[[PeerT], Awaitable[AnswerT]],
    *,
    on_failure: Callable[[], Awaitable[None]] | None = None,
    phase: str = "a joint call",
) -> Answers[PeerT, AnswerT]:
    """Calls every peer concurrently and waits for all.

    Args:
        peers: whom to call.
        call: one peer's call; ends by its own deadline.
        on_failure: run once, at the first failure, while other calls are still under way (to
            make them end: a collective that lost a member does not end by itself). Calls that go
            on all the same when it returns are given up and count as failed.
        phase: what the calls are about, for errors.
    """
    answers: Answers[PeerT, AnswerT] = Answers()
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
            name = str(getattr(peer, "name", peer))
            answers.failed[peer] = PeerError(name, phase, "given up: another failed")
        finally:
            scopes.discard(scope)
        if peer in answers.failed:
            first_failure.set()

    async def react(handler: Callable[[], Awaitable[None]]) -> None:
        await first_failure.wait()
        await handler()
        for scope in scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async with asyncio.TaskGroup() as outer:
        reaction = outer.create_task(react(on_failure), name="on-failure") if on_failure else None
        async with asyncio.TaskGroup() as calls:
            for peer in peers:
                calls.create_task(ask(peer), name=f"call-{peer}")
        if reaction is not None and not first_failure.is_set():
            reaction.cancel()
    return answers


class SyncPhase(StrEnum):
    """What a delivery of weights does, in order."""

    FORM = "form"  # the group of replicas, where it is another than before
    ENCODE = "encode"  # what changed since the version that all of them serve
    STAGE = "stage"  # the transfer, while generation goes on
    COMMIT = "commit"  # the swap


class SyncCounts:
    """Used from one event loop."""

    def __init__(self) -> None:
        self.seconds: dict[SyncPhase, float] = dict.fromkeys(SyncPhase, 0.0)
        self.failures: Counter[SyncPhase] = Counter()
        self.updates: Counter[str] = Counter()
        self.sparse_bytes = 0
        self.dense_bytes = 0
        self.whole_bytes = 0
        self.stall_s = 0.0

    @contextmanager
    def timed(self, phase: SyncPhase) -> Iterator[None]:
        """The block is this phase."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - began_s

    def failed(self, phase: SyncPhase) -> None:
        """An attempt ended here."""
        self.failures[phase] += 1

    def arrived(self, to: str, sent_bytes: int, whole_bytes: int, stall_s: float) -> None:
        """Replicas serve a version.

        Args:
            to: ``fleet`` or ``newcomers``.
            sent_bytes: on the wire, once for all.
            whole_bytes: of all weights; more than `sent_bytes` if only changes were sent.
            stall_s: longest time in which one of them drew no token.
        """
        self.updates[to] += 1
        self.whole_bytes += whole_bytes
        if sent_bytes < whole_bytes:
            self.sparse_bytes += sent_bytes
        else:
            self.dense_bytes += sent_bytes
        self.stall_s += stall_s


# One transfer group after another to a set of replicas: forms, stages, commits, says who failed.
#
# Consumes: a snapshot and the replicas that shall get it.
# Waits for: an answer of each member before a group is formed, then formation, staging and commit;
#     each has a deadline. Who neither answers nor gives another sign of life is left out of the
#     group, since the others would wait for it as long as a formation may take.
# Unblocked by: answers, deadlines, and at the first failure by leaving the epoch on both sides.
# Produces: who serves the version now, proven by a digest equal to ours, and who must be dropped.
#     What all members of the group serve already is the base of the next update: if few bytes
#     changed since, only these are sent.
# On failure: an error in a collective says that *someone* is gone, not who; all members are probed,
#     and the group is over. Nothing is retried inside an epoch, and the next begins with all bytes.
# On shutdown: `close` leaves the group.

logger = logging.getLogger(__name__)

GroupMember = ReplicaInfo | None
"""One end of a collective; ``None`` is ourselves."""

SignsOfLife = Callable[[], Mapping[str, float]]
"""When each replica was last heard of, by instance, on any clock that rises."""

_ASKS = 2
"""How often a member is asked before it is left out: on a loaded machine one answer may be late."""

ReadAgain = Callable[[Snapshot], AbstractContextManager[WeightBuffer | None]]
"""The memory of an earlier snapshot, if it still is what it was; see `SnapshotBuffers`."""


class ReplicaCalls(Protocol):
    """How one replica is steered; every call raises `SluiceError` by its own deadline."""

    async def join(self, spec: TransferGroupSpec) -> None:
        """Joins an epoch's group."""
        ...

    async def stage(self, epoch: int, version: int) -> str:
        """Receives a version; the digest of what arrived."""
        ...

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        """Swaps the staged version in; seconds of stall."""
        ...

    async def abort(self, epoch: int, reason: str) -> None:
        """Throws away what is staged and leaves the epoch."""
        ...

    async def probe(self, timeout_s: float) -> None:
        """Returns when its engine answers."""
        ...

    async def close(self) -> None:
        """Ends the connection."""
        ...


@dataclass(slots=True)
class DeliveryResult:
    """What came of one attempt.

    `served` holds seconds of stall. `lost` have to be dropped; `refused` for good, since they say
    that the weights do not suit them. `is_complete` is false if the others must get it again.
    `report` tells what went out, if it arrived.
    """

    served: Mapping[ReplicaInfo, float] = field(default_factory=dict)
    lost: dict[ReplicaInfo, str] = field(default_factory=dict)
    refused: dict[ReplicaInfo, str] = field(default_factory=dict)
    is_complete: bool = False
    report: BroadcastReport | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """What all members of the present group serve."""

    snapshot: Snapshot
    digest: str


class TransferSession:
    """A sender and the members of its present group.

    Args:
        sender: rank 0 of every group; closed with the lane.
        connect: opens the control calls to a replica.
        tensors: the weights as they travel.
        next_epoch: numbers that rise, over all lanes.
        timeout_s: seconds our own part of a collective has to end after a failure.
        probe_timeout_s: seconds a replica has to answer, before a group is formed and after a
            failure.
        signs_of_life: of the replicas, other than answers; ``None``: there are none.
        read_again: where earlier snapshots are found; ``None``: updates are always sent whole.
        counts: of what deliveries take, over all lanes.
    """

    def __init__(  # noqa: PLR0913 - all that a delivery meets on its way
        self,
        sender: WeightSender,
        connect: Callable[[ReplicaInfo], ReplicaCalls],
        tensors: Sequence[TensorSpec],
        next_epoch: Callable[[], int],
        *,
        timeout_s: float,
        probe_timeout_s: float,
        signs_of_life: SignsOfLife | None = None,
        read_again: ReadAgain | None = None,
        counts: SyncCounts | None = None,
    ) -> None:
        self._counts = counts or SyncCounts()
        self._signs_of_life = signs_of_life or dict
        self._read_again = read_again
        self._held: _Held | None = None
        self._sender = sender
        self._connect = connect
        self._tensors = tuple(tensors)
        self._next_epoch = next_epoch
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s
        self._epoch = 0
        self._members: tuple[ReplicaInfo, ...] = ()
        self._clients: dict[ReplicaInfo, ReplicaCalls] = {}

    async def deliver(self, members: tuple[ReplicaInfo, ...], snapshot: Snapshot) -> DeliveryResult:
        """Sends one version to `members`, in a new epoch if they are not those of the last one."""
        delivery = DeliveryResult()
        if self._members != members and not await self._formed(members, delivery):
            return delivery
        # Before anybody waits in a collective, whose deadline this would use up.
        with self._counts.timed(SyncPhase.ENCODE):
            update = await self._changes_to(snapshot)
        with self._counts.timed(SyncPhase.STAGE):
            delivery.report = await self._stage(snapshot, update, delivery)
        if delivery.report is None:
            self._counts.failed(SyncPhase.STAGE)
            return delivery
        with self._counts.timed(SyncPhase.COMMIT):
            await self._commit(delivery.report, snapshot, delivery)
        if len(delivery.served) < len(self._members):
            self._counts.failed(SyncPhase.COMMIT)
        return delivery

    async def close(self) -> None:
        """Leaves the group, ends all control calls and stops listening."""
        await self._leave()
        self._sender.close()

    async def _formed(self, members: tuple[ReplicaInfo, ...], delivery: DeliveryResult) -> bool:
        with self._counts.timed(SyncPhase.FORM):
            is_formed = await self._form(members, delivery)
        if not is_formed:
            self._counts.failed(SyncPhase.FORM)
        return is_formed

    async def _form(self, members: tuple[ReplicaInfo, ...], delivery: DeliveryResult) -> bool:
        await self._leave()
        self._epoch = self._next_epoch()
        self._clients = {member: self._connect(member) for member in members}
        members = await self._living(members, delivery)
        if not members:
            await self._leave()
            return False
        keys = {member: f"{member.name}/{member.instance_id}" for member in members}
        ranks = {keys[member]: member.ranks for member in members}
        specs = self._sender.form_group(self._epoch, list(keys.values()), self._tensors, ranks)
        answers = await self._together(
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

    async def _living(
        self, members: tuple[ReplicaInfo, ...], delivery: DeliveryResult
    ) -> tuple[ReplicaInfo, ...]:
        """Who answers, or is slow but heard of while it is asked; the others are lost."""
        before: Mapping[str, float] = {}
        silent = members
        for _ in range(_ASKS):
            # Read anew: a heartbeat from before it fell silent may arrive during the first.
            before = self._signs_of_life()
            probes = await self._probe(silent)
            silent = tuple(probes.failed)
            if not silent:
                return members
        after = self._signs_of_life()
        for member in silent:
            key = member.instance_id
            if key in after and after[key] != before.get(key):
                logger.info("%s answers no probe, but is heard of: it stays", member.name)
                continue
            delivery.lost[member] = (
                f"silent when the group of epoch {self._epoch} was to be formed: "
                f"{probes.failed[member]}"
            )
        return tuple(member for member in members if member not in delivery.lost)

    async def _probe(self, members: Sequence[ReplicaInfo]) -> Answers[ReplicaInfo, None]:
        return await fan_out(
            members, lambda member: self._clients[member].probe(self._probe_timeout_s)
        )

    async def _stage(
        self, snapshot: Snapshot, update: SparseUpdate | None, delivery: DeliveryResult
    ) -> BroadcastReport | None:
        members, version = self._members, snapshot.version
        reports: list[BroadcastReport] = []
        digests: dict[ReplicaInfo, str] = {}

        async def receive(member: ReplicaInfo) -> None:
            digests[member] = await self._clients[member].stage(self._epoch, version)

        def send(stop: threading.Event) -> None:
            reports.append(self._sender.broadcast(snapshot.weights, version, stop, update))

        phase = f"staging version {version}"
        answers = await self._together(members, receive, send, phase)
        if reports:
            _compare(digests, reports[0].digest, answers, delivery)
        if answers.failed:
            await self._recover(members, answers, delivery, phase)
            return None
        return reports[0]

    async def _changes_to(self, snapshot: Snapshot) -> SparseUpdate | None:
        """What changed since the version that all members serve, if that is known and worth it."""
        held, read_again = self._held, self._read_again
        if held is None or read_again is None:
            return None
        base, stop = Base(held.snapshot.version, held.digest), threading.Event()

        def encode() -> SparseUpdate | None:
            with read_again(held.snapshot) as old:
                if old is None:
                    return None
                return self._sender.encode_update(base, old, snapshot.weights, stop)

        try:
            return await asyncio.to_thread(encode)
        finally:
            stop.set()  # a cancelled delivery must not leave the thread behind

    async def _commit(
        self, report: BroadcastReport, snapshot: Snapshot, delivery: DeliveryResult
    ) -> None:
        version, digest = report.version, report.digest
        answers = await fan_out(
            self._members,
            lambda member: self._clients[member].commit(self._epoch, version, digest),
        )
        delivery.lost.update({member: str(error) for member, error in answers.failed.items()})
        delivery.served, delivery.is_complete = answers.answered, True
        self._held = None if answers.failed else _Held(snapshot, digest)

    async def _together(
        self,
        members: tuple[ReplicaInfo, ...],
        call: Callable[[ReplicaInfo], Awaitable[None]],
        own: Callable[[threading.Event], None],
        phase: str,
    ) -> Answers[GroupMember, None]:
        """We and all members enter a collective; one failure ends it for all."""
        stop, we_are_out = threading.Event(), asyncio.Event()

        async def enter(member: GroupMember) -> None:
            if member is not None:
                await call(member)
                return
            try:
                await asyncio.to_thread(own, stop)
            finally:
                we_are_out.set()

        async def end_it() -> None:
            stop.set()
            self._sender.abandon("a member failed")
            await self._abort(members)
            async with deadline(self._timeout_s, peer="trainer", phase="leaving a failed epoch"):
                await we_are_out.wait()

        try:
            return await fan_out((None, *members), enter, on_failure=end_it, phase=phase)
        finally:
            stop.set()  # a cancelled delivery must not leave the sending thread behind

    async def _abort(self, members: Sequence[ReplicaInfo]) -> None:
        epoch = self._epoch
        await fan_out(members, lambda member: self._clients[member].abort(epoch, "a member failed"))

    async def _recover(
        self,
        members: tuple[ReplicaInfo, ...],
        answers: Answers[GroupMember, None],
        delivery: DeliveryResult,
        phase: str,
    ) -> None:
        """Finds out who is gone; the group is over."""
        for peer, error in answers.failed.items():
            logger.warning("%s: %s: %s", phase, peer.name if peer else "trainer", error)
            if peer is not None and isinstance(error, InvalidRequestError):
                delivery.refused[peer] = f"refused while {phase}: {error}"
        probes = await self._probe(members)
        for member, silent in probes.failed.items():
            delivery.lost[member] = f"silent after a failure while {phase}: {silent}"
        await self._leave()

    async def _leave(self) -> None:
        self._sender.abandon("the group is over")
        async with AsyncExitStack() as stack:
            for client in self._clients.values():
                stack.push_async_callback(client.close)
        self._members, self._clients, self._held = (), {}, None


def _compare(
    digests: Mapping[ReplicaInfo, str],
    sent: str,
    answers: Answers[GroupMember, None],
    delivery: DeliveryResult,
) -> None:
    """Members that received something else than was sent have failed, whatever they say."""
    for member, digest in digests.items():
        if digest != sent:
            error = WeightSyncError(member.name, "stage", f"its digest is {digest}, ours {sent}")
            answers.failed[member] = error
            delivery.lost[member] = str(error)
