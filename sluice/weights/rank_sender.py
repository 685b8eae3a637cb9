"""A trainer rank's end of an epoch's groups: send its holding to each class of workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from sluice.device.protocol import Device
from sluice.types import TransferGroupSpec
from sluice.weight_share import WeightShare
from sluice.weights.delta import ChangeSendingPort, SparseUpdate, encode_update
from sluice.weights.digest import WeightDigests
from sluice.weights.group import TransferGroup, run_concurrently
from sluice.weights.plan import TransferPlan, WeightBuffer, stream_of
from sluice.weights.transfer import (
    IN_FLIGHT,
    BaseVersion,
    BucketPort,
    DeviceSendingPort,
    DirectPort,
    UpdateHeader,
    UpdateTrailer,
    broadcast_buckets,
    send,
    version_deadline_s,
)

Changes = Sequence[SparseUpdate | None]
"""The changes to send to each class of workers; ``None`` sends its share whole."""


@dataclass(frozen=True, slots=True)
class SentStream:
    """What a rank sent to a class of workers; bytes include padding."""

    digests: WeightDigests
    num_bytes: int


@dataclass(frozen=True, slots=True)
class JoinOrder:
    """The information that a rank needs to form its groups of an epoch.

    `shares` and `workers` hold an entry per class; workers are named by rank. `spec` is common to
    all groups.
    """

    spec: TransferGroupSpec
    shares: tuple[WeightShare, ...]
    workers: tuple[Mapping[int, str], ...]


class RemoteRank(Protocol):
    """Rank 0's calls to another sending rank. They block, except `leave`, which ends the others.

    Raises (all methods but `leave`):
        WeightSyncError: the rank failed, vanished, or was stopped. Names it.
        DeadlineError: it did not answer in time.
    """

    def join(self, order: JoinOrder, should_stop: threading.Event) -> None:
        """Make the rank enter its groups, and wait until they are formed."""
        ...

    def encode(
        self,
        epoch: int,
        bases: Sequence[BaseVersion],
        version: int,
        timeout_s: float,
        should_stop: threading.Event,
    ) -> bool:
        """Make the rank compute and keep its changes; return whether they save bytes."""
        ...

    def send(
        self,
        epoch: int,
        version: int,
        plans: Sequence[TransferPlan | None],
        timeout_s: float,
        should_stop: threading.Event,
        has_changes: bool,
    ) -> list[SentStream]:
        """Make the rank send a version; return what each class got, in the order of `plans`."""
        ...

    def probe(self, timeout_s: float) -> None:
        """Check that the rank answers."""
        ...

    def leave(self, epoch: int, reason: str) -> None:
        """Make the rank leave an epoch; end the calls for it, and return at once."""
        ...


NOTHING = SentStream(WeightDigests((), ()), 0)


class RankSender:
    """Rank 0 of the groups of one epoch: one group for each class that takes a part of its holding.

    Methods block; call them from one thread at a time. Any thread may call `abandon`.

    Args:
        spec: the spec that all groups of the epoch share.
        number: index of this sender among those of the epoch.
        plans: the plans of its streams, by class; ``None`` if it has nothing for that class.
        name: the name of this rank, for errors.
        workers: the names of each class's workers, by rank, for errors.
        device: where collectives run.
    """

    def __init__(
        self,
        spec: TransferGroupSpec,
        number: int,
        plans: Sequence[TransferPlan | None],
        name: str,
        workers: Sequence[Mapping[int, str]],
        device: Device,
        keeps_base: bool,
    ) -> None:
        self._device, self._keeps_base = device, keeps_base
        self._streams = [
            None
            if plan is None
            else (
                plan,
                TransferGroup(
                    replace(
                        replace(spec, group=group, world_size=1 + len(names)).of_sender(number),
                        plan_digest=plan.digest,
                    ),
                    {0: name, **names},
                    device,
                ),
            )
            for group, (plan, names) in enumerate(zip(plans, workers, strict=True))
        ]

    def join(self, should_stop: threading.Event) -> None:
        """Enter the groups; block until every member has entered. Errors as `WeightSender.join`."""
        groups = [stream[1] for stream in self._streams if stream is not None]
        run_concurrently([partial(group.form, should_stop) for group in groups], self._give_up)

    def encode(
        self,
        bases: Sequence[BaseVersion],
        old: WeightBuffer,
        new: WeightBuffer,
        should_stop: threading.Event,
    ) -> Changes:
        """Return the changes for each class, if that saves bytes.

        Args:
            bases: the version that each class has, with the weights `old`.
            old: this rank's holding of that version.
            new: this rank's holding of the version to send.
        """
        return [
            None if stream is None else encode_update(stream[0], base, old, new, should_stop)
            for stream, base in zip(self._streams, bases, strict=True)
        ]

    def send(
        self,
        weights: WeightBuffer,
        version: int,
        should_stop: threading.Event,
        update: Changes | None = None,
    ) -> list[SentStream]:
        """Send one version; return what was sent to each class. Errors as
        `WeightSender.broadcast`."""
        changes = update or (None,) * len(self._streams)
        calls = [
            partial(self._send, *stream, weights, version, should_stop, change)
            for stream, change in zip(self._streams, changes, strict=True)
            if stream is not None
        ]
        sent = iter(run_concurrently(calls, self._give_up))
        return [NOTHING if stream is None else next(sent) for stream in self._streams]

    def abandon(self, reason: str) -> None:
        """Leave all groups and return at once; a call in progress fails soon."""
        for stream in self._streams:
            if stream is not None:
                stream[1].abandon(reason)

    def _give_up(self) -> None:
        self.abandon("another group of the epoch failed")

    def _send(
        self,
        plan: TransferPlan,
        group: TransferGroup,
        weights: WeightBuffer,
        version: int,
        should_stop: threading.Event,
        change: SparseUpdate | None,
    ) -> SentStream:
        plan_sizes = tuple(bucket.num_bytes for bucket in plan.buckets)
        sizes, base = (plan_sizes, None) if change is None else (change.sizes, change.base)
        header = UpdateHeader(version, sizes, base, keep=self._keeps_base)
        phase = f"broadcasting version {version} in epoch {group.spec.epoch}"

        def send_all() -> WeightDigests:
            send(group, header.encode(), phase, "the header", should_stop)
            bucket_port = self._port(plan, weights, change)  # on the stream of this thread
            digests = broadcast_buckets(group, plan, bucket_port, phase, should_stop)
            trailer = UpdateTrailer(version, plan.total_bytes, digests.parts)
            send(group, trailer.encode(), phase, "the trailer", should_stop)
            return digests

        timeout_s = version_deadline_s(plan, group.spec.timeout_s)
        digests = group.run(send_all, phase, timeout_s, should_stop)
        return SentStream(digests, plan.total_bytes if change is None else sum(change.sizes))

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
