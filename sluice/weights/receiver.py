"""The replica's end of weight transfers.

Input: the spec of an epoch, then versions. Output: each version complete in staging memory, proven
by the senders' digests; nothing here touches live weights. Where several trainer ranks send, each
has a stream and a group of its own, and all streams arrive at the same time. `join` waits for the
other members, `stage` for each collective; completion, the epoch's timeout, `abort` or a new `join`
end these waits. After a failure the epoch is over and the staged weights are dropped; the replica
still serves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sluice.device.protocol import Device
from sluice.errors import InvalidRequestError, NotReadyError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weight_share import WHOLE, WeightShare
from sluice.weights.delta import ChangeReceivingPort
from sluice.weights.digest import WeightDigests, join_digests
from sluice.weights.group import SENDER_NAME, TransferGroup, rank_name, run_concurrently
from sluice.weights.holdings import check_holdings, joint_digest, stream_plans
from sluice.weights.plan import TransferPlan, WeightBuffer, plan_transfer, stream_of
from sluice.weights.transfer import (
    IN_FLIGHT,
    BaseVersion,
    BucketPort,
    CopyingPort,
    DirectPort,
    UpdateHeader,
    UpdateTrailer,
    broadcast_buckets,
    header_bytes,
    receive,
    trailer_bytes,
    version_deadline_s,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class StagedWeights:
    """A complete version with verified digests.

    `digests` were computed from `buffer` and equal the senders'. `received_bytes` includes padding;
    `seconds` is the time from the request to the last byte. The memory belongs to the caller until
    `WeightReceiver.recycle` or `WeightReceiver.keep`. `is_base`: later updates may build on this
    version.
    """

    version: int
    digests: WeightDigests
    buffer: WeightBuffer
    received_bytes: int
    seconds: float
    is_base: bool = False

    @property
    def digest(self) -> str:
        """Return the digest of all parts."""
        return self.digests.combined

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the parts on the CPU, by checkpoint name: views of the staging memory."""
        return self.buffer.tensors


@dataclass(frozen=True, slots=True)
class _Stream:
    """The stream of one sender."""

    plan: TransferPlan
    group: TransferGroup
    sender: str


@dataclass(frozen=True, slots=True)
class _ReceivedStream:
    """A received stream of a version."""

    header: UpdateHeader
    digests: WeightDigests
    num_bytes: int


class WeightReceiver:
    """Rank 1 or higher of each epoch's groups.

    `join` and `stage` block; call them from one thread at a time. Any thread may call `abort`.

    Args:
        device: where collectives run; its backend must be the spec's.
        share: the part of the weights that is received.
        in_place: receive a version into the memory of the previous one, which must not be read any
            more. Otherwise two versions are held at a time.
    """

    def __init__(
        self,
        device: Device,
        share: WeightShare = WHOLE,
        *,
        in_place: bool = False,
    ) -> None:
        self._share = share
        self._in_place = in_place
        self._device = device
        self._streams: tuple[_Stream, ...] = ()
        self._plan: TransferPlan | None = None
        self._spare: WeightBuffer | None = None
        self._held: StagedWeights | None = None
        self._staging = threading.Lock()

    def join(self, spec: TransferGroupSpec, should_stop: threading.Event | None = None) -> str:
        """Leave any earlier epoch and enter this one; block until every member has entered.

        Args:
            should_stop: ends the wait, even if it is set before the wait begins.

        Returns:
            the plan's digest, as computed here.

        Raises:
            InvalidRequestError: a spec that contradicts itself or this replica's device or model,
                or whose plan has another digest here. Nothing was joined, no byte moved.
            WeightSyncError: the formation failed.
            DeadlineError: members did not arrive in time; the error names their ranks.
        """
        plans = self._accept(spec)
        self.abort(f"epoch {spec.epoch} begins")
        plan = plan_transfer(spec.tensors, spec.bucket_bytes, self._share)
        ranks = {rank: f"rank {rank}" for rank in range(1, spec.world_size)}
        senders = [rank_name(holding.rank) for holding in spec.holdings] or [SENDER_NAME]
        streams = []
        for number, (stream, sender) in enumerate(zip(plans, senders, strict=True)):
            if stream is not None:
                names = {0: sender, **ranks}
                group = TransferGroup(spec.of_sender(number), names, self._device)
                streams.append(_Stream(stream, group, sender))
        self._streams, self._plan = tuple(streams), plan
        stop = should_stop or threading.Event()
        run_concurrently([partial(stream.group.form, stop) for stream in streams], self._give_up)
        return joint_digest(plans)

    def stage(self, version: int) -> StagedWeights:
        """Receive one version. Repeatable in one epoch.

        Raises:
            NotReadyError: there is no formed group, or another version is being staged.
            WeightSyncError: a collective failed or was aborted, the update builds on a version that
                is not held here or is damaged, or the trailer does not match the request and the
                bytes received. The epoch is then over.
            DeadlineError: all collectives together exceeded their time limit.
        """
        if not self._staging.acquire(blocking=False):
            raise NotReadyError(f"version {version}: another version is being staged; abort it")
        try:
            return self._stage(version)
        finally:
            self._staging.release()

    def recycle(self, staged: StagedWeights) -> None:
        """Reuse staging memory for a later version; its tensors must not be used again."""
        self._spare = staged.buffer

    def keep(self, staged: StagedWeights, *, lent: bool = False) -> None:
        """Take over the staging memory of a version that serves from now on.

        No code may write to its tensors again. If later updates may build on it, or if it is `lent`
        to a model that computes from it, the receiver holds the version until the next call; then
        its memory is spare.
        """
        if not staged.is_base and not lent:
            self.recycle(staged)
            return
        previous, self._held = self._held, staged
        if previous is not None and previous is not staged:
            self.recycle(previous)

    def abort(self, reason: str) -> None:
        """Leave the epoch, if any, and return at once; a call in progress fails soon."""
        for stream in self._streams:
            stream.group.abandon(reason)

    def _give_up(self) -> None:
        self.abort("another group of the epoch failed")

    def close(self) -> None:
        """Leave the epoch and drop spare memory and the version held."""
        self.abort("the receiver is closed")
        self._spare = self._held = None

    def _accept(self, spec: TransferGroupSpec) -> tuple[TransferPlan | None, ...]:
        if not 1 <= spec.rank < spec.world_size:
            raise InvalidRequestError(
                f"rank {spec.rank} of {spec.world_size}: a receiver's rank is 1 to world_size - 1"
            )
        if spec.ranks != 1:
            raise InvalidRequestError(
                f"ranks = {spec.ranks}: the group has several for this replica, whose engine takes "
                "one; run the same version of sluice on both ends"
            )
        if spec.backend != self._device.collective_backend:
            raise InvalidRequestError(
                f'backend "{spec.backend}": this replica receives on {self._device.name} over '
                f'"{self._device.collective_backend}"; configure both ends for the same backend'
            )
        check_holdings(spec.holdings, spec.tensors)
        plans = stream_plans(spec.tensors, spec.bucket_bytes, self._share, spec.holdings)
        if (digest := joint_digest(plans)) != spec.plan_digest:
            raise InvalidRequestError(
                f"epoch {spec.epoch}: the sender's plan digest is {spec.plan_digest}, computed "
                f"here {digest}; run the same version of sluice on both ends"
            )
        return plans

    def _stage(self, version: int) -> StagedWeights:
        streams, plan = self._streams, self._plan
        if not streams or plan is None:
            raise NotReadyError(f"version {version}: no epoch was joined")
        started = time.monotonic()
        held = self._held
        # Local until it is complete: after a failure the abandoned operation may still write into
        # this memory, so it is never used again.
        buffer = self._take_memory(plan)
        arrived = run_concurrently(
            [partial(self._receive, stream, version, buffer, held) for stream in streams],
            self._give_up,
        )
        return StagedWeights(
            version,
            join_digests([received.digests for received in arrived]),
            buffer,
            sum(received.num_bytes for received in arrived),
            time.monotonic() - started,
            is_base=any(received.header.keep for received in arrived),
        )

    def _receive(
        self, stream: _Stream, version: int, buffer: WeightBuffer, held: StagedWeights | None
    ) -> _ReceivedStream:
        group, plan, sender = stream.group, stream.plan, stream.sender
        phase = f"receiving version {version} in epoch {group.spec.epoch}"
        stop = threading.Event()

        def receive_all() -> _ReceivedStream:
            content = receive(group, header_bytes(plan), phase, "the header", stop)
            header = _read_header(content, plan, version, sender, phase)
            bucket_port = self._port_for(header, stream, buffer, held, phase)
            digests = broadcast_buckets(group, plan, bucket_port, phase, stop)
            content = receive(group, trailer_bytes(plan), phase, "the trailer", stop)
            _check_trailer(content, version, plan, digests, sender, phase)
            size = plan.total_bytes if header.base is None else sum(header.sizes)
            return _ReceivedStream(header, digests, size)

        timeout_s = version_deadline_s(plan, group.spec.timeout_s)
        return group.run(receive_all, phase, timeout_s, stop)

    def _take_memory(self, plan: TransferPlan) -> WeightBuffer:
        spare, self._spare = self._spare, None
        if self._in_place and self._held is not None:
            # From now on it holds neither version until the new one is complete.
            spare, self._held = self._held.buffer, None
        if spare is not None and spare.plan == plan:
            return spare
        return WeightBuffer(plan, beside=self._device.torch_device)

    def _port_for(
        self,
        header: UpdateHeader,
        stream: _Stream,
        buffer: WeightBuffer,
        held: StagedWeights | None,
        phase: str,
    ) -> BucketPort:
        device, plan = self._device.torch_device, stream.plan
        memory = stream_of(plan, buffer, IN_FLIGHT)
        if header.base is None and device.type == "cpu" and isinstance(memory, WeightBuffer):
            return DirectPort(memory)
        if header.base is None:
            return CopyingPort(memory, plan, device)
        try:
            base = _base(held, header.base)
            base_memory = memory if base is buffer else stream_of(plan, base, IN_FLIGHT)
            return ChangeReceivingPort(
                plan, memory, base_memory, header.sizes, device, stream.sender, phase
            )
        except ValueError as error:
            raise WeightSyncError(stream.sender, phase, str(error)) from error


def _base(held: StagedWeights | None, wanted: BaseVersion) -> WeightBuffer:
    if held is None or not held.is_base or BaseVersion(held.version, held.digest) != wanted:
        held_text = "none" if held is None else f"version {held.version} ({held.digest})"
        raise ValueError(
            f"the update builds on version {wanted.version} ({wanted.digest}); "
            f"held here is {held_text}"
        )
    return held.buffer


def _read_header(
    content: torch.Tensor, plan: TransferPlan, version: int, sender: str, phase: str
) -> UpdateHeader:
    try:
        header = UpdateHeader.decode(content)
    except ValueError as error:
        raise WeightSyncError(sender, phase, str(error)) from error
    plan_sizes = tuple(bucket.num_bytes for bucket in plan.buckets)
    if header.version != version:
        raise WeightSyncError(sender, phase, f"it sent version {header.version}")
    if header.base is None and header.sizes != plan_sizes:
        raise WeightSyncError(sender, phase, "its buckets are not those of the plan")
    return header


def _check_trailer(
    content: torch.Tensor,
    version: int,
    plan: TransferPlan,
    digests: WeightDigests,
    sender: str,
    phase: str,
) -> None:
    try:
        trailer = UpdateTrailer.decode(content)
    except ValueError as error:
        raise WeightSyncError(sender, phase, str(error)) from error
    if trailer.version != version:
        detail = f"it sent version {trailer.version}"
    elif trailer.total_bytes != plan.total_bytes:
        detail = f"it sent {trailer.total_bytes} bytes, {plan.total_bytes} were received"
    elif different := digests.differing_names(trailer.digests):
        detail = (
            f"tensor {different[0]} differs from what was sent; {len(different)} of "
            f"{len(plan.tensors)} tensors differ"
        )
    else:
        return
    raise WeightSyncError(sender, phase, detail)
