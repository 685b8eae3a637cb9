"""The trainer's end of weight transfers.

Input: weights and their version, or the changes since an earlier one. Output: one broadcast per
version to all members of the current epoch: a header, the buckets, a trailer with the digest of
each tensor. `join` waits for members, `broadcast` for each collective, up to the timeout or the
stop event. That every byte was *sent* proves nothing about a receiver (sockets buffer megabytes);
only its answer with the same digest does. After a failure the epoch is over: `form_group` starts
the next one, and everything is sent again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.device.protocol import Device
from sluice.errors import InvalidRequestError, NotReadyError
from sluice.types import TensorSpec, TransferCertificates, TransferGroupSpec
from sluice.weights.group import SENDER_NAME, TransferGroup
from sluice.weights.plan import (
    TransferPlan,
    WeightBuffer,
    hiding_bucket_bytes,
    plan_transfer,
)
from sluice.weights.rendezvous import KEY_BYTES, RendezvousStore
from sluice.weights.sparse_update import ChangeSendingPort, SparseUpdate, encode_update
from sluice.weights.transfer import (
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


@dataclass(frozen=True, slots=True)
class BroadcastReport:
    """One version that was sent. Every receiver must report `digest`; bytes count padding.

    `sent_bytes` counts the buckets, or their changes; `dense_bytes` counts all weights.
    """

    version: int
    digest: str
    sent_bytes: int
    dense_bytes: int
    seconds: float


def broadcast_deadline_s(
    tensors: Sequence[TensorSpec], bucket_bytes: int, timeout_s: float
) -> float:
    """Return the seconds that all collectives of one version may take together.

    Args:
        tensors: the tensors to send, tied weights once.
        bucket_bytes: of the `WeightSender`.
        timeout_s: for each collective.
    """
    return version_deadline_s(_plan(tensors, bucket_bytes), timeout_s)


class WeightSender:
    """The host of the rendezvous store and rank 0 of every epoch's group.

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
        self._group: TransferGroup | None = None
        self._plan: TransferPlan | None = None
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
        ranks: Mapping[str, int] | None = None,
    ) -> dict[str, TransferGroupSpec]:
        """Begin an epoch, leaving any earlier one, and return at once.

        Deliver each spec to its member and call `join` at the same time: all must join for the
        group to form.

        Args:
            epoch: larger than every epoch before.
            members: names of the receivers, unique; they get ranks from 1 on in this order.
            tensors: what will be sent, tied weights once.
            ranks: how many consecutive ones each member gets; 1 unless it is named here.

        Returns:
            the spec for each member, by name, with its first rank. It holds the epoch's secret:
            keep it out of logs.

        Raises:
            InvalidRequestError: an epoch that does not rise, no or repeated members, or tensors
                that cannot be planned.
        """
        places = _places(members, ranks or {})
        self._check_epoch(epoch, members)
        plan = _plan(tensors, self._bucket_bytes)
        self.abandon(f"epoch {epoch} begins")
        # A new secret: a member of an earlier epoch that comes late cannot enter this one.
        store_key = secrets.token_bytes(KEY_BYTES)
        self._store.begin(epoch, store_key)
        self._last_epoch, self._plan = epoch, plan
        spec = TransferGroupSpec(
            epoch=epoch,
            host=self._store.host,
            port=self._store.port,
            rank=0,
            world_size=1 + sum(count for _, count in places.values()),
            backend=self._device.collective_backend,
            bucket_bytes=plan.bucket_bytes,
            timeout_s=self._timeout_s,
            tensors=plan.tensors,
            plan_digest=plan.digest,
            store_key=store_key,
        )
        # Members verify the store by certificates of their own; these hold the private key.
        own_spec = replace(spec, certificates=self._certificates)
        self._group = TransferGroup(own_spec, {0: SENDER_NAME, **_names(places)}, self._device)
        return {
            name: replace(spec, rank=first, ranks=count) for name, (first, count) in places.items()
        }

    def join(self, should_stop: threading.Event) -> None:
        """Enter the group that `form_group` began; block until every member has entered.

        Args:
            should_stop: set it when a member's control channel fails; the epoch is then over.

        Raises:
            DeadlineError: members did not come in time; names them.
            WeightSyncError: the formation failed or was stopped.
        """
        self._current()[0].form(should_stop)

    def encode_update(
        self, base: Base, old: WeightBuffer, new: WeightBuffer, should_stop: threading.Event
    ) -> SparseUpdate | None:
        """Return the changes to broadcast instead of all of `new`; ``None`` if they are too many.

        Args:
            base: version and digest of `old`; every member of the epoch must have committed it.
            old: its weights. They must not change until this returns.
            new: the weights to be broadcast.
            should_stop: set it to give up early.

        Raises:
            InvalidRequestError: the weights are not those of the epoch.
            NotReadyError: there is no epoch.
        """
        return encode_update(self._current()[1], base, old, new, should_stop)

    def broadcast(
        self,
        weights: WeightBuffer,
        version: int,
        should_stop: threading.Event,
        update: SparseUpdate | None = None,
    ) -> BroadcastReport:
        """Send one version to all members. Repeatable in one epoch.

        Args:
            weights: exactly the tensors of the epoch, in their order. They are sent without a copy
                if the wire is on the CPU, and must not change until this returns.
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
        group, plan = self._current()
        bucket_port = self._port(plan, weights, update)
        header = self._header(plan, version, update)
        phase = f"broadcasting version {version} in epoch {group.spec.epoch}"

        def send_all() -> str:
            send(group, header.encode(), phase, "the header", should_stop)
            digests = broadcast_buckets(group, plan, bucket_port, phase, should_stop)
            trailer = Trailer(version, plan.total_bytes, digests.tensors)
            send(group, trailer.encode(), phase, "the trailer", should_stop)
            return digests.combined

        started = time.monotonic()
        timeout_s = version_deadline_s(plan, self._timeout_s)
        digest = group.run(send_all, phase, timeout_s, should_stop)
        seconds = time.monotonic() - started
        sent_bytes = plan.total_bytes if update is None else sum(update.sizes)
        return BroadcastReport(version, digest, sent_bytes, plan.total_bytes, seconds)

    def abandon(self, reason: str) -> None:
        """Leave the current epoch, if any, and return at once; a call in progress fails soon."""
        if self._group is not None:
            self._group.abandon(reason)

    def close(self) -> None:
        """Leave the epoch and stop listening."""
        self.abandon("the sender is closed")
        self._store.close()

    def _check_epoch(self, epoch: int, members: Sequence[str]) -> None:
        if self._last_epoch is not None and epoch <= self._last_epoch:
            raise InvalidRequestError(
                f"epoch {epoch}: must be larger than {self._last_epoch}, the last one"
            )
        if not members or len(set(members)) != len(members):
            raise InvalidRequestError(
                f"members {list(members)}: a group needs at least one receiver, each name once"
            )

    def _current(self) -> tuple[TransferGroup, TransferPlan]:
        if self._group is None or self._plan is None:
            raise NotReadyError("no transfer group: call form_group first")
        return self._group, self._plan

    def _header(
        self, plan: TransferPlan, version: int, update: SparseUpdate | None
    ) -> UpdateHeader:
        whole = tuple(bucket.num_bytes for bucket in plan.buckets)
        sizes, base = (whole, None) if update is None else (update.sizes, update.base)
        return UpdateHeader(version, sizes, base, keep=self._keeps_base)

    def _port(
        self, plan: TransferPlan, weights: WeightBuffer, update: SparseUpdate | None
    ) -> BucketPort:
        if weights.plan.tensors != plan.tensors:
            different = sorted({*plan.tensors} ^ {*weights.plan.tensors}, key=lambda one: one.name)
            raise InvalidRequestError(
                f"weights: {different[:3]} are in only one of the epoch's {len(plan.tensors)} "
                f"tensors and the {len(weights.plan.tensors)} given, or the order differs; form a "
                "new epoch for other weights"
            )
        wire_device = self._device.torch_device
        if update is not None:
            return ChangeSendingPort(update, weights, wire_device)
        if wire_device.type == "cpu":
            return DirectPort(weights)
        return DeviceSendingPort(weights, plan, wire_device)


def _plan(tensors: Sequence[TensorSpec], most_bucket_bytes: int) -> TransferPlan:
    return plan_transfer(tensors, hiding_bucket_bytes(tensors, most_bucket_bytes))


def _places(members: Sequence[str], ranks: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return each member's first rank and its number of ranks."""
    places: dict[str, tuple[int, int]] = {}
    following = 1
    for name in members:
        count = ranks.get(name, 1)
        places[name] = (following, count)
        following += count
    return places


def _names(places: Mapping[str, tuple[int, int]]) -> dict[int, str]:
    """Return the member of each rank, for errors."""
    return {
        first + worker: name if count == 1 else f"{name} worker {worker}"
        for name, (first, count) in places.items()
        for worker in range(count)
    }
