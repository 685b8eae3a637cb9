"""The trainer's end of weight transfers.

Input: weights and their version, or the changes since an earlier one. Output: one broadcast per
version to all members of the current epoch: a header, the buckets, a trailer with the digest of
each part. Workers that take the same share of the weights are in one group with a broadcast of its
own; those of an epoch run at the same time. `join` waits for members, `broadcast` for each
collective, up to the timeout or the stop event. That every byte was *sent* proves nothing about a
receiver (sockets buffer megabytes); only its answer with the same digest does. After a failure the
epoch is over: `form_group` starts the next one, and everything is sent again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

from sluice.device.protocol import Device
from sluice.errors import InvalidRequestError, NotReadyError
from sluice.types import TensorSpec, TransferCertificates, TransferGroupSpec
from sluice.weight_share import WeightShare
from sluice.weights.classes import ShareClass, rank_names, share_classes, specs_of
from sluice.weights.digest import WeightDigests, combined_digest
from sluice.weights.group import SENDER_NAME, TransferGroup
from sluice.weights.plan import (
    MOST_HIDING_BUCKETS,
    TransferPlan,
    WeightBuffer,
    hiding_bucket_bytes,
    plan_transfer,
    stream_of,
)
from sluice.weights.rendezvous import KEY_BYTES, RendezvousStore
from sluice.weights.sparse_update import ChangeSendingPort, SparseUpdate, encode_update
from sluice.weights.transfer import (
    IN_FLIGHT,
    Base,
    BucketPort,
    DeviceSendingPort,
    DirectPort,
    Trailer,
    UpdateHeader,
    broadcast_buckets,
    send,
    version_deadline_s,
)

_T = TypeVar("_T")

Changes = Sequence[SparseUpdate | None]
"""The changes to send to each class of workers; ``None``: it gets its share whole."""


@dataclass(frozen=True, slots=True)
class BroadcastReport:
    """One version that was sent. Each member must report its digest; bytes count padding.

    Attributes:
        digests: of what each member's workers have together, by member.
        bases: what each class of workers has now.
        sent_bytes: buckets of all classes, or their changes.
        dense_bytes: the shares of all classes.
    """

    version: int
    digests: Mapping[str, str]
    bases: tuple[Base, ...]
    sent_bytes: int
    dense_bytes: int
    seconds: float

    @property
    def digest(self) -> str:
        """Return the digest of members that all divide the weights in the same way.

        Raises:
            ValueError: they do not.
        """
        (only,) = {*self.digests.values()}
        return only


def broadcast_deadline_s(
    tensors: Sequence[TensorSpec], bucket_bytes: int, timeout_s: float
) -> float:
    """Return the seconds that all collectives of one version may take together, of any share.

    Args:
        tensors: the tensors to send, tied weights once.
        bucket_bytes: of the `WeightSender`.
        timeout_s: for each collective.
    """
    plan = plan_transfer(tensors, hiding_bucket_bytes(tensors, bucket_bytes))
    # A share has smaller buckets than the whole if it is small, and may then have a few more.
    more = max(0, MOST_HIDING_BUCKETS - len(plan.buckets))
    return version_deadline_s(plan, timeout_s) + more * timeout_s


@dataclass(frozen=True, slots=True)
class _ClassGroup:
    """A class of workers and the group that they form with the sender."""

    members: ShareClass
    group: TransferGroup

    @property
    def plan(self) -> TransferPlan:
        return self.members.plan


class WeightSender:
    """The host of the rendezvous store and rank 0 of every epoch's groups.

    Methods block; call them from one thread at a time. Any thread may call `abandon` and `close`.

    Args:
        device: where collectives run; decides the backend.
        bucket_bytes: largest collective, a multiple of 64; small models use smaller ones.
        timeout_s: for each formation and each collective.
        host: the address that members connect to.
        port: where the rendezvous store listens; 0 lets the operating system choose.
        bind_host: the address to listen on, by default `host`.
        certificates: with which the rendezvous store serves TLS; none: it does not.
        keeps_base: whether receivers hold the version that they committed, for updates to build
            on. It costs them the memory of the weights once more.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        *,
        device: Device,
        bucket_bytes: int,
        timeout_s: float,
        host: str = "127.0.0.1",
        port: int = 0,
        bind_host: str | None = None,
        certificates: TransferCertificates | None = None,
        keeps_base: bool = True,
    ) -> None:
        self._keeps_base = keeps_base
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._certificates = certificates
        self._store = RendezvousStore(host, port, bind_host, certificates)
        self._classes: tuple[_ClassGroup, ...] = ()
        self._last_epoch: int | None = None

    @property
    def port(self) -> int:
        """Return where the rendezvous store listens."""
        return self._store.port

    def form_group(
        self,
        epoch: int,
        members: Sequence[str],
        tensors: Sequence[TensorSpec],
        shares: Mapping[str, Sequence[WeightShare]] | None = None,
    ) -> dict[str, TransferGroupSpec]:
        """Begin an epoch, leaving any earlier one, and return at once.

        Deliver each spec to its member and call `join` at the same time: all must join for the
        groups to form.

        Args:
            epoch: larger than every epoch before.
            members: names of the receivers, unique.
            tensors: what will be sent, tied weights once.
            shares: of each member's workers; a member that is not named has one worker, which
                takes all weights.

        Returns:
            the spec for each member, by name. It holds the epoch's secret: keep it out of logs.

        Raises:
            InvalidRequestError: an epoch that does not rise, no or repeated members, or tensors
                that cannot be planned.
        """
        shares = shares or {}
        self._check_epoch(epoch, members)
        classes = share_classes(members, tensors, shares, self._bucket_bytes)
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
            bucket_bytes=classes[0].plan.bucket_bytes,
            timeout_s=self._timeout_s,
            tensors=tuple(tensors),
            plan_digest="",
            store_key=store_key,
        )
        several = {name for name, given in shares.items() if len(given) > 1}
        # Members verify the store by certificates of their own; these hold the private key.
        own = replace(spec, certificates=self._certificates)
        self._classes = tuple(
            self._group_of(own, number, one, several) for number, one in enumerate(classes)
        )
        return specs_of(spec, classes)

    def _group_of(
        self, spec: TransferGroupSpec, number: int, one: ShareClass, several: set[str]
    ) -> _ClassGroup:
        own = replace(spec, group=number, world_size=one.world_size, plan_digest=one.plan.digest)
        names = {0: SENDER_NAME, **rank_names(one, several)}
        return _ClassGroup(one, TransferGroup(own, names, self._device))

    def join(self, should_stop: threading.Event) -> None:
        """Enter the groups that `form_group` began; block until every member has entered.

        Args:
            should_stop: set it when a member's control channel fails; the epoch is then over.

        Raises:
            DeadlineError: members did not come in time; names them.
            WeightSyncError: the formation failed or was stopped.
        """
        self._for_each([partial(one.group.form, should_stop) for one in self._current()])

    def encode_update(
        self,
        bases: Sequence[Base],
        old: WeightBuffer,
        new: WeightBuffer,
        should_stop: threading.Event,
    ) -> Changes | None:
        """Return the changes to broadcast instead of all of `new`; ``None`` if they are too many.

        Args:
            bases: of the report on `old`; every member of the epoch must have committed it.
            old: its weights. They must not change until this returns.
            new: the weights to be broadcast.
            should_stop: set it to give up early.

        Raises:
            InvalidRequestError: the weights are not those of the epoch.
            NotReadyError: there is no epoch.
        """
        changes = [
            encode_update(one.plan, base, old, new, should_stop)
            for one, base in zip(self._current(), bases, strict=True)
        ]
        return changes if any(changes) else None

    def broadcast(
        self,
        weights: WeightBuffer,
        version: int,
        should_stop: threading.Event,
        update: Changes | None = None,
    ) -> BroadcastReport:
        """Send one version to all members. Repeatable in one epoch.

        Args:
            weights: exactly the tensors of the epoch, in their order. They are sent without a copy
                if the wire is on the CPU and workers take all of them, and must not change until
                this returns.
            version: goes to the receivers in header and trailer.
            should_stop: set it when a member's control channel fails; the epoch is then over.
            update: from `encode_update` of the same weights; sent instead of them.

        Raises:
            InvalidRequestError: the weights are not those of the epoch; nothing was sent.
            NotReadyError: there is no formed group.
            WeightSyncError: a collective failed, stalled or was stopped. Names the members (any
                of them may be the cause: probe them) and the bucket.
            DeadlineError: the whole took longer than all its collectives may together.
        """
        classes = self._current()
        _check_weights(classes[0].plan, weights)
        changes = update or (None,) * len(classes)
        started = time.monotonic()
        found = self._for_each(
            [
                partial(self._send, one, weights, version, should_stop, change)
                for one, change in zip(classes, changes, strict=True)
            ]
        )
        sizes = [one.plan.total_bytes for one in classes]
        sent = [
            size if change is None else sum(change.sizes)
            for size, change in zip(sizes, changes, strict=True)
        ]
        return BroadcastReport(
            version,
            _member_digests(classes, found),
            tuple(Base(version, digests.combined) for digests in found),
            sum(sent),
            sum(sizes),
            time.monotonic() - started,
        )

    def abandon(self, reason: str) -> None:
        """Leave the current epoch, if any, and return at once; a call in progress fails soon."""
        for one in self._classes:
            one.group.abandon(reason)

    def close(self) -> None:
        """Leave the epoch and stop listening."""
        self.abandon("the sender is closed")
        self._store.close()

    def _for_each(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Make the calls, one of each class, at the same time; if one fails, the epoch is over."""
        if len(calls) == 1:
            return [calls[0]()]
        with ThreadPoolExecutor(len(calls), thread_name_prefix="weights-class") as threads:
            running = [threads.submit(call) for call in calls]
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            failed = [one for one in running if one in ended and one.exception() is not None]
            if failed:  # the others' collectives must not wait until their deadlines
                self.abandon("another group of the epoch failed")
                failed[0].result()
        return [one.result() for one in running]

    def _send(
        self,
        one: _ClassGroup,
        weights: WeightBuffer,
        version: int,
        should_stop: threading.Event,
        change: SparseUpdate | None,
    ) -> WeightDigests:
        group, plan = one.group, one.plan
        bucket_port = self._port(plan, weights, change)
        header = self._header(plan, version, change)
        phase = f"broadcasting version {version} in epoch {group.spec.epoch}"

        def send_all() -> WeightDigests:
            send(group, header.encode(), phase, "the header", should_stop)
            digests = broadcast_buckets(group, plan, bucket_port, phase, should_stop)
            trailer = Trailer(version, plan.total_bytes, digests.parts)
            send(group, trailer.encode(), phase, "the trailer", should_stop)
            return digests

        return group.run(send_all, phase, version_deadline_s(plan, self._timeout_s), should_stop)

    def _check_epoch(self, epoch: int, members: Sequence[str]) -> None:
        if self._last_epoch is not None and epoch <= self._last_epoch:
            raise InvalidRequestError(
                f"epoch {epoch}: must be larger than {self._last_epoch}, the last one"
            )
        if not members or len(set(members)) != len(members):
            raise InvalidRequestError(
                f"members {list(members)}: a group needs at least one receiver, each name once"
            )

    def _current(self) -> tuple[_ClassGroup, ...]:
        if not self._classes:
            raise NotReadyError("no transfer group: call form_group first")
        return self._classes

    def _header(
        self, plan: TransferPlan, version: int, update: SparseUpdate | None
    ) -> UpdateHeader:
        whole = tuple(bucket.num_bytes for bucket in plan.buckets)
        sizes, base = (whole, None) if update is None else (update.sizes, update.base)
        return UpdateHeader(version, sizes, base, keep=self._keeps_base)

    def _port(
        self, plan: TransferPlan, weights: WeightBuffer, update: SparseUpdate | None
    ) -> BucketPort:
        wire_device = self._device.torch_device
        stream = stream_of(plan, weights, IN_FLIGHT)
        if update is not None:
            return ChangeSendingPort(update, stream, wire_device)
        if wire_device.type == "cpu":
            return DirectPort(stream)
        return DeviceSendingPort(stream, plan, wire_device)


def _check_weights(plan: TransferPlan, weights: WeightBuffer) -> None:
    if weights.plan.tensors != plan.tensors:
        different = sorted({*plan.tensors} ^ {*weights.plan.tensors}, key=lambda one: one.name)
        raise InvalidRequestError(
            f"weights: {different[:3]} are in only one of the epoch's {len(plan.tensors)} tensors "
            f"and the {len(weights.plan.tensors)} given, or the order differs; form a new epoch "
            "for other weights"
        )


def _member_digests(
    classes: Sequence[_ClassGroup], found: Sequence[WeightDigests]
) -> dict[str, str]:
    """Return the digest of each member: a part that several of its workers have counts once."""
    classes_of: dict[str, dict[int, None]] = {}
    for number, one in enumerate(classes):
        for name, _ in one.members.workers:
            classes_of.setdefault(name, {})[number] = None

    @cache
    def digest_of(numbers: tuple[int, ...]) -> str:  # many members, few ways to divide
        parts: dict[str, bytes] = {}
        for number in numbers:
            parts |= found[number].by_name
        return combined_digest(parts)

    return {name: digest_of(tuple(numbers)) for name, numbers in classes_of.items()}
