"""The trainer's end of weight transfers.

Input: weights and their version, or the changes since an earlier one. Output: one broadcast per
version to all members of the current epoch: a header, the buckets, a trailer with the digest of
each part. Workers that take the same share of the weights are in one group with a broadcast of its
own; those of an epoch run at the same time. If several trainer ranks hold the weights, each sends
its part to groups of its own, and rank 0 steers the others (`RemoteRank`). `join`
waits for members, `broadcast` for each collective, up to the timeout or the stop event. That every
byte was *sent* proves nothing about a receiver (sockets buffer megabytes); only its answer with the
same digest does. After a failure the epoch is over: `form_group` starts the next one, and
everything is sent again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

from sluice.device.protocol import Device
from sluice.errors import InvalidRequestError, NotReadyError
from sluice.types import TensorSpec, TransferCertificates, TransferGroupSpec
from sluice.weight_share import WHOLE, Holding, WeightShare, WorkerPlace
from sluice.weights.digest import combined_digest, join_digests
from sluice.weights.group import SENDER_NAME, rank_name, run_concurrently
from sluice.weights.holdings import (
    held_part,
    joint_digest,
    stream_bucket_bytes,
    stream_plans,
)
from sluice.weights.plan import MAX_HIDING_BUCKETS, TransferPlan, WeightBuffer
from sluice.weights.rank_sender import Changes, JoinOrder, RankSender, RemoteRank
from sluice.weights.rendezvous import KEY_BYTES, RendezvousStore
from sluice.weights.transfer import BaseVersion, version_deadline_s

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BroadcastReport:
    """The report on a sent version. Each member must return its digest; bytes include padding.

    Attributes:
        digests: the digest that each member must return, by member.
        bases: the version that each class of workers has now.
        sent_bytes: bytes of all classes' buckets, or of their changes.
        dense_bytes: bytes of all classes' shares.
        rank_bytes: `sent_bytes` of each sending rank.
    """

    version: int
    digests: Mapping[str, str]
    bases: tuple[BaseVersion, ...]
    sent_bytes: int
    dense_bytes: int
    rank_bytes: tuple[int, ...]


def broadcast_deadline_s(
    tensors: Sequence[TensorSpec],
    bucket_bytes: int,
    timeout_s: float,
    holdings: Sequence[Holding] = (),
) -> float:
    """Return the time limit for all collectives of a version together, for any share, seconds.

    Args:
        timeout_s: time limit of each collective.
    """
    size = stream_bucket_bytes(tensors, bucket_bytes, WHOLE, holdings)
    plans = [p for p in stream_plans(tensors, size, WHOLE, holdings) if p is not None]
    longest = max(plans, key=lambda plan: len(plan.buckets))
    # A share has smaller buckets than the whole if it is small, and may then have a few more.
    num_more = max(0, MAX_HIDING_BUCKETS - len(longest.buckets))
    return version_deadline_s(longest, timeout_s) + num_more * timeout_s


Worker = tuple[str, int]
"""A member's name and the number of one of its workers."""


@dataclass(frozen=True, slots=True)
class ShareClass:
    """The workers with one share; the first has rank 1.

    `plans` holds the plan of each sender's stream to them; ``None`` if it has nothing for them.
    """

    plans: tuple[TransferPlan | None, ...]
    workers: tuple[Worker, ...]
    share: WeightShare

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all streams."""
        return sum(plan.total_bytes for plan in self.plans if plan is not None)


def share_classes(
    members: Sequence[str],
    tensors: Sequence[TensorSpec],
    shares: Mapping[str, Sequence[WeightShare]],
    max_bucket_bytes: int,
    holdings: Sequence[Holding] = (),
) -> tuple[ShareClass, ...]:
    """Return the classes, in the order of their first workers.

    Args:
        shares: the shares of each member's workers; a member that is not named has one worker,
            which takes all weights.
        holdings: the holdings of the sending ranks; empty if one rank holds all weights.
    """
    workers: dict[WeightShare, list[Worker]] = {}
    for name in members:
        for number, share in enumerate(shares.get(name, (WHOLE,))):
            workers.setdefault(share, []).append((name, number))
    # One size for all, since a member has one spec.
    bucket_bytes = max(
        stream_bucket_bytes(tensors, max_bucket_bytes, share, holdings) for share in workers
    )
    return tuple(
        ShareClass(
            stream_plans(tensors, bucket_bytes, share, holdings), tuple(workers_of_share), share
        )
        for share, workers_of_share in workers.items()
    )


def member_specs(
    spec: TransferGroupSpec, classes: Sequence[ShareClass]
) -> dict[str, TransferGroupSpec]:
    """Return the spec of each member, by name, from what is common to all."""
    places: dict[str, dict[int, WorkerPlace]] = {}
    for group, share_class in enumerate(classes):
        digest = joint_digest(share_class.plans)
        for rank, (name, number) in enumerate(share_class.workers, 1):
            place = WorkerPlace(group, rank, 1 + len(share_class.workers), digest)
            places.setdefault(name, {})[number] = place
    return {
        name: _member_spec(spec, [of_group[number] for number in sorted(of_group)])
        for name, of_group in places.items()
    }


def _member_spec(spec: TransferGroupSpec, places: Sequence[WorkerPlace]) -> TransferGroupSpec:
    spec_of_first = replace(spec, ranks=len(places), places=tuple(places)).of_worker(0)
    is_one_group = {place.group for place in places} == {0}
    return replace(spec_of_first, ranks=len(places), places=() if is_one_group else tuple(places))


def _rank_names(group: ShareClass, shares: Mapping[str, Sequence[WeightShare]]) -> dict[int, str]:
    """Return the member of each rank, for errors."""
    return {
        rank: f"{name} worker {number}" if len(shares.get(name, ())) > 1 else name
        for rank, (name, number) in enumerate(group.workers, 1)
    }


class WeightSender:
    """Hosts the rendezvous store, and sends as rank 0 of its groups in every epoch.

    Methods block; call them from one thread at a time. Any thread may call `abandon` and `close`.

    Args:
        device: the device of the collectives; determines the backend.
        bucket_bytes: largest collective, a multiple of 64; small models use smaller ones.
        timeout_s: time limit of each formation and each collective.
        host: the address that members connect to.
        bind_host: the address to listen on, by default `host`.
        certificates: TLS certificates of the rendezvous store; without them it does not use TLS.
        keeps_base: whether receivers keep the committed version as a base for updates, which costs
            them a second copy of the weights.
        holdings: the holdings of the sending trainer ranks, this one's first; empty if it holds all
            weights.
        other_ranks: the ranks of the other holdings, in their order.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(  # noqa: PLR0913 - an address, the settings of groups, and the ranks
        self,
        *,
        device: Device,
        bucket_bytes: int,
        timeout_s: float,
        host: str = "127.0.0.1",
        bind_host: str | None = None,
        certificates: TransferCertificates | None = None,
        keeps_base: bool = True,
        holdings: Sequence[Holding] = (),
        other_ranks: Sequence[RemoteRank] = (),
    ) -> None:
        self._keeps_base = keeps_base
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._certificates = certificates
        self._holdings, self._other_ranks = tuple(holdings), tuple(other_ranks)
        self._store = RendezvousStore(host, 0, bind_host, certificates)
        self._classes: tuple[ShareClass, ...] = ()
        self._tensors: tuple[TensorSpec, ...] = ()
        self._sender: RankSender | None = None
        self._order: JoinOrder | None = None
        self._last_epoch: int | None = None
        self._entered_epoch: int | None = None  # the epoch that other ranks are in

    def form_group(
        self,
        epoch: int,
        members: Sequence[str],
        tensors: Sequence[TensorSpec],
        shares: Mapping[str, Sequence[WeightShare]] | None = None,
    ) -> dict[str, TransferGroupSpec]:
        """Begin an epoch, leaving any earlier one, and return at once.

        Deliver each spec to its member and call `join` concurrently: groups form when all members
        join.

        Args:
            epoch: larger than every epoch before.
            members: names of the receivers, unique.
            tensors: the tensors to send, tied weights once.
            shares: the shares of each member's workers; a member that is not named has one worker,
                which takes all weights.

        Returns:
            the spec for each member, by name. It holds the epoch's secret: keep it out of logs.

        Raises:
            InvalidRequestError: an epoch that does not rise, no or repeated members, or tensors
                that cannot be planned.
        """
        shares = shares or {}
        self._check_epoch(epoch, members)
        classes = share_classes(members, tensors, shares, self._bucket_bytes, self._holdings)
        self.abandon(f"epoch {epoch} begins")
        # A new secret: a member of an earlier epoch that comes late cannot enter this one.
        store_key = secrets.token_bytes(KEY_BYTES)
        self._store.begin(epoch, store_key)
        self._last_epoch = epoch
        spec = TransferGroupSpec(
            epoch=epoch,
            host=self._store.host,
            port=self._store.port,
            rank=0,
            world_size=0,
            backend=self._device.collective_backend,
            bucket_bytes=next(
                plan.bucket_bytes for c in classes for plan in c.plans if plan is not None
            ),
            timeout_s=self._timeout_s,
            tensors=tuple(tensors),
            plan_digest="",
            store_key=store_key,
            holdings=self._holdings,
        )
        names = [_rank_names(c, shares) for c in classes]
        self._classes, self._tensors = classes, tuple(tensors)
        # Members verify the store by certificates of their own; these hold the private key.
        own_spec = replace(spec, certificates=self._certificates)
        name = rank_name(self._holdings[0].rank) if self._holdings else SENDER_NAME
        plans = [c.plans[0] for c in classes]
        self._sender = RankSender(own_spec, 0, plans, name, names, self._device, self._keeps_base)
        self._order = JoinOrder(spec, tuple(c.share for c in classes), tuple(names))
        return member_specs(spec, classes)

    def join(self, should_stop: threading.Event) -> None:
        """Enter the groups that `form_group` began; block until every member has entered.

        Args:
            should_stop: set it when a member's control channel fails; the epoch is then over.

        Raises:
            DeadlineError: members did not come in time; names them.
            WeightSyncError: the formation failed or was stopped, here or on another rank.
        """
        sender, order = self._current_epoch()
        self._entered_epoch = order.spec.epoch
        calls = [partial(rank.join, order, should_stop) for rank in self._other_ranks]
        self._run_on_all_ranks([partial(sender.join, should_stop), *calls])

    def encode_update(
        self,
        bases: Sequence[BaseVersion],
        old: WeightBuffer,
        new: WeightBuffer,
        should_stop: threading.Event,
        version: int = 0,
    ) -> Changes | None:
        """Return the changes to broadcast instead of all of `new`; ``None`` if there are too many.

        Other ranks compute and keep the changes of their parts.

        Args:
            bases: of the report on `old`; every member of the epoch must have committed it.
            old: that version's weights, or this rank's part. They must not change until this
                returns.
            new: the weights to broadcast.
            version: the version of `new`; only other ranks need it.

        Raises:
            InvalidRequestError: the weights are not those of the epoch.
            NotReadyError: there is no epoch.
            WeightSyncError: another rank failed.
        """
        sender, order = self._current_epoch()
        changes: list[Changes] = []

        def encode() -> bool:
            changes.append(sender.encode(bases, old, new, should_stop))
            return any(changes[0])

        calls: list[Callable[[], bool]] = [
            partial(rank.encode, order.spec.epoch, bases, version, self._limit_s(n), should_stop)
            for n, rank in enumerate(self._other_ranks, 1)
        ]
        is_worthwhile = run_concurrently([encode, *calls], should_stop.set)
        return changes[0] if any(is_worthwhile) else None

    def broadcast(
        self,
        weights: WeightBuffer,
        version: int,
        should_stop: threading.Event,
        update: Changes | None = None,
    ) -> BroadcastReport:
        """Send one version to all members. Repeatable in one epoch.

        Args:
            weights: exactly the tensors of the epoch in their order, or this rank's part of them.
                They are sent without a copy if the wire is on the CPU and workers take all of
                them, and must not change until this returns. Other ranks have a snapshot of the
                same version.
            should_stop: set it when a member's control channel fails; the epoch is then over.
            update: from `encode_update` of the same weights; sent instead of them.

        Raises:
            InvalidRequestError: the weights are not those of the epoch; nothing was sent.
            NotReadyError: there is no formed group.
            WeightSyncError: a collective failed, stalled or was stopped. Names the members (any
                of them may be the cause: probe them, and the other ranks) and the bucket.
            DeadlineError: all collectives together exceeded their time limit.
        """
        sender, order = self._current_epoch()
        self._check_weights(weights)
        has_changes = update is not None
        calls = [
            partial(
                rank.send,
                order.spec.epoch,
                version,
                self._plans(n),
                self._limit_s(n),
                should_stop,
                has_changes,
            )
            for n, rank in enumerate(self._other_ranks, 1)
        ]
        sent = self._run_on_all_ranks(
            [partial(sender.send, weights, version, should_stop, update), *calls]
        )
        numbers = range(len(self._classes))
        of_class = [join_digests([rank[n].digests for rank in sent]) for n in numbers]
        parts = [digests.by_name for digests in of_class]
        rank_bytes = tuple(sum(stream.num_bytes for stream in rank) for rank in sent)
        return BroadcastReport(
            version,
            _member_digests(self._classes, parts),
            tuple(BaseVersion(version, digests.combined) for digests in of_class),
            sum(rank_bytes),
            sum(share_class.total_bytes for share_class in self._classes),
            rank_bytes,
        )

    def probe_others(self, timeout_s: float) -> None:
        """Check that the other ranks still answer.

        Raises:
            WeightSyncError, DeadlineError: a rank does not answer; the error names it.
        """
        if self._other_ranks:
            probes = [partial(rank.probe, timeout_s) for rank in self._other_ranks]
            run_concurrently(probes, lambda: None)

    def abandon(self, reason: str) -> None:
        """Leave the current epoch, if any, and return at once; a call in progress fails soon."""
        if self._sender is not None:
            self._sender.abandon(reason)
        entered, self._entered_epoch = self._entered_epoch, None
        if entered is not None:
            for rank in self._other_ranks:
                rank.leave(entered, reason)

    def close(self) -> None:
        """Leave the epoch and stop listening."""
        self.abandon("the sender is closed")
        self._store.close()

    def _run_on_all_ranks(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        return run_concurrently(calls, lambda: self.abandon("another group of the epoch failed"))

    def _plans(self, number: int) -> tuple[TransferPlan | None, ...]:
        """Return the plans of a rank's streams, by class."""
        return tuple(share_class.plans[number] for share_class in self._classes)

    def _limit_s(self, number: int) -> float:
        """Return the seconds that a rank may take for a version."""
        plans = [plan for plan in self._plans(number) if plan is not None]
        return max((version_deadline_s(plan, self._timeout_s) for plan in plans), default=0.0)

    def _check_epoch(self, epoch: int, members: Sequence[str]) -> None:
        if self._last_epoch is not None and epoch <= self._last_epoch:
            raise InvalidRequestError(
                f"epoch {epoch}: must be larger than {self._last_epoch}, the last one"
            )
        if not members or len(set(members)) != len(members):
            raise InvalidRequestError(
                f"members {list(members)}: a group needs at least one receiver, each name once"
            )

    def _current_epoch(self) -> tuple[RankSender, JoinOrder]:
        if self._sender is None or self._order is None:
            raise NotReadyError("no transfer group: call form_group first")
        return self._sender, self._order

    def _check_weights(self, weights: WeightBuffer) -> None:
        part = held_part(self._tensors, WHOLE, self._holdings[0] if self._holdings else None)
        expected = () if part is None else part[0]
        if (tensors := weights.plan.tensors) != expected:
            different = sorted({*expected} ^ {*tensors}, key=lambda spec: spec.name)
            raise InvalidRequestError(
                f"weights: {different[:3]} are in only one of the epoch's {len(expected)} tensors "
                f"and the {len(tensors)} given, or the order differs; form a new epoch "
                "for other weights"
            )


def _member_digests(
    classes: Sequence[ShareClass], by_class: Sequence[Mapping[str, bytes]]
) -> dict[str, str]:
    """Return the digest of each member; a part that several of its workers have counts once."""
    classes_of: dict[str, dict[int, None]] = {}
    for number, share_class in enumerate(classes):
        for name, _ in share_class.workers:
            classes_of.setdefault(name, {})[number] = None

    @cache
    def digest_of(numbers: tuple[int, ...]) -> str:  # many members, few ways to divide
        parts: dict[str, bytes] = {}
        for number in numbers:
            parts |= by_class[number]
        return combined_digest(parts)

    return {name: digest_of(tuple(numbers)) for name, numbers in classes_of.items()}
