"""Trainer ranks that send their parts of the weights, and rank 0's calls to them.

A rank above 0 serves `SendingRank`: it has snapshots of its weights, and forms groups, encodes
changes and sends when rank 0 calls. It answers when it is done; leaving an epoch ends calls in
progress. Rank 0 calls it through a `SendingRankClient`: every wait ends at a deadline, the caller's
stop or `leave`, and errors name the rank.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from sluice.api.weights.v1 import weights_pb2 as messages
from sluice.api.weights.v1 import weights_pb2_grpc as services
from sluice.codec.weights import share_from_proto, share_to_proto
from sluice.config.addresses import join_host_port
from sluice.device.protocol import Device
from sluice.errors import DeadlineError, NotReadyError, SluiceError, WeightSyncError
from sluice.types import TensorSpec, TransferCertificates, TransferGroupSpec
from sluice.weight_share import Holding
from sluice.weights.digest import DIGEST_BYTES, WeightDigests, part_names
from sluice.weights.group import rank_name
from sluice.weights.holdings import stream_plans
from sluice.weights.plan import TransferPlan
from sluice.weights.rank_sender import (
    NOTHING,
    Changes,
    JoinOrder,
    RankSender,
    RemoteRank,
    SentStream,
)
from sluice.weights.rendezvous import (
    KEY_METADATA,
    MAX_RANK_MESSAGE_BYTES,
    bind,
    member_channel,
    member_server,
    stop_server,
)
from sluice.weights.snapshot import SnapshotBuffers
from sluice.weights.transfer import BaseVersion

_log = logging.getLogger(__name__)
_AnswerT = TypeVar("_AnswerT")
_RequestT = TypeVar(
    "_RequestT",
    messages.JoinGroupsRequest,
    messages.EncodeChangesRequest,
    messages.SendVersionRequest,
    messages.ProbeRequest,
)

_THREADS = 8
_LEFT_EPOCHS = 64
_CHECK_EVERY_S = 0.05
_GRACE_S = 3.0
"""Seconds beyond the rank's own deadline, so that its more specific error arrives."""
_LEAVE_S = 10.0


@dataclass(slots=True)
class _Epoch:
    sender: RankSender
    workers: frozenset[str]
    changes: Changes | None = None


class SendingRank(services.SendingRankServiceServicer):
    """A rank above 0, which sends its part of each version. It serves until `close`.

    Args:
        timeout_s: deadline of each formation and each collective.
        key: secret of the run, which rank 0 sends.
        certificates: TLS certificates, for this server and the rendezvous store.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(  # noqa: PLR0913 - what it holds, the settings of groups, and an address
        self,
        number: int,
        holdings: Sequence[Holding],
        tensors: Sequence[TensorSpec],
        snapshots: SnapshotBuffers,
        *,
        device: Device,
        timeout_s: float,
        keeps_base: bool,
        host: str,
        key: bytes,
        certificates: TransferCertificates | None = None,
    ) -> None:
        self._number, self._holdings = number, tuple(holdings)
        self._tensors, self._snapshots = tuple(tensors), snapshots
        self._device, self._timeout_s, self._keeps_base = device, timeout_s, keeps_base
        self._certificates = certificates
        self._epochs: dict[int, _Epoch] = {}
        self._left_epochs: deque[int] = deque(maxlen=_LEFT_EPOCHS)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sending-rank")
        self._server = member_server(
            self._threads, lambda shown: hmac.compare_digest(shown, key), MAX_RANK_MESSAGE_BYTES
        )
        services.add_SendingRankServiceServicer_to_server(self, self._server)
        self.port = bind(self._server, host, 0, certificates)
        self._server.start()

    def close(self) -> None:
        """Leave all epochs and stop listening."""
        with self._lock:
            epochs, self._epochs = self._epochs, {}
        for epoch in epochs.values():
            epoch.sender.abandon("the trainer rank ends")
        stop_server(self._server, self._threads)

    def JoinGroups(
        self, request: messages.JoinGroupsRequest, context: grpc.ServicerContext
    ) -> messages.JoinGroupsResponse:
        def join(stop: threading.Event) -> messages.JoinGroupsResponse:
            sender = self._make_sender(request)
            workers = frozenset(name for group in request.classes for name in group.workers)
            for ended in self._start_epoch(request.epoch, _Epoch(sender, workers)):
                ended.abandon("the epoch is over")
            sender.join(stop)
            return messages.JoinGroupsResponse()

        return _answer(context, join)

    def EncodeChanges(
        self, request: messages.EncodeChangesRequest, context: grpc.ServicerContext
    ) -> messages.EncodeChangesResponse:
        def encode(stop: threading.Event) -> messages.EncodeChangesResponse:
            epoch = self._epoch(request.epoch)
            bases = [BaseVersion(request.base_version, digest) for digest in request.base_digests]
            read = self._snapshots.read
            epoch.changes = None
            # If the previous version is overwritten by now, all weights are sent.
            with (
                suppress(NotReadyError),
                read(request.base_version) as old,
                read(request.policy_version) as new,
            ):
                epoch.changes = epoch.sender.encode(bases, old.weights, new.weights, stop)
            return messages.EncodeChangesResponse(saves=any(epoch.changes or ()))

        return _answer(context, encode)

    def SendVersion(
        self, request: messages.SendVersionRequest, context: grpc.ServicerContext
    ) -> messages.SendVersionResponse:
        def send(stop: threading.Event) -> messages.SendVersionResponse:
            epoch, version = self._epoch(request.epoch), request.policy_version
            changes, epoch.changes = epoch.changes, None
            if not request.changes:
                changes = None
            with self._snapshots.read(version) as snapshot:
                sent = epoch.sender.send(snapshot.weights, version, stop, changes)
            return messages.SendVersionResponse(
                streams=[
                    messages.SentStream(digests=b"".join(s.digests.parts), num_bytes=s.num_bytes)
                    for s in sent
                ]
            )

        return _answer(context, send)

    def LeaveGroups(
        self, request: messages.LeaveGroupsRequest, context: grpc.ServicerContext
    ) -> messages.LeaveGroupsResponse:
        with self._lock:
            self._left_epochs.append(request.epoch)  # the call that joins it may come later
            epoch = self._epochs.pop(request.epoch, None)
        if epoch is not None:
            epoch.sender.abandon(request.reason)
        return messages.LeaveGroupsResponse()

    def Probe(
        self, request: messages.ProbeRequest, context: grpc.ServicerContext
    ) -> messages.ProbeResponse:
        return messages.ProbeResponse()

    def _make_sender(self, request: messages.JoinGroupsRequest) -> RankSender:
        holding = self._holdings[self._number]
        spec = TransferGroupSpec(
            epoch=request.epoch,
            host=request.host,
            port=request.port,
            rank=0,
            world_size=0,
            backend=self._device.collective_backend,
            bucket_bytes=request.bucket_bytes,
            timeout_s=self._timeout_s,
            tensors=self._tensors,
            plan_digest="",
            store_key=request.store_key,
            certificates=self._certificates,
            holdings=self._holdings,
        )
        shares = [share_from_proto(group.share, "classes") for group in request.classes]
        plans = [
            stream_plans(self._tensors, request.bucket_bytes, share, [holding])[0]
            for share in shares
        ]
        workers = [dict(enumerate(group.workers, 1)) for group in request.classes]
        name = rank_name(holding.rank)
        return RankSender(spec, self._number, plans, name, workers, self._device, self._keeps_base)

    def _start_epoch(self, number: int, new: _Epoch) -> list[RankSender]:
        """Note an epoch, unless it is over; return the senders of epochs that are over now."""
        with self._lock:
            # A worker is in one group at a time, so the calls to leave its earlier groups were
            # lost.
            rivals = [
                n for n, epoch in self._epochs.items() if n == number or epoch.workers & new.workers
            ]
            if number in self._left_epochs or max(rivals, default=number) > number:
                return [new.sender]
            self._left_epochs.extend(n for n in rivals if n < number)
            ended = [self._epochs.pop(n).sender for n in rivals]
            self._epochs[number] = new
            return ended

    def _epoch(self, number: int) -> _Epoch:
        with self._lock:
            if number not in self._epochs:
                raise NotReadyError(f"epoch {number} is over or has not begun")
            return self._epochs[number]


def _answer(context: grpc.ServicerContext, work: Callable[[threading.Event], _AnswerT]) -> _AnswerT:
    """Return the answer, or send an error to rank 0. The end of the call ends the work."""
    stop = threading.Event()
    context.add_callback(stop.set)
    try:
        return work(stop)
    except SluiceError as error:
        _log.warning("weights: %s", error)
        context.abort(grpc.StatusCode.ABORTED, str(error))
        raise AssertionError from error  # `abort` raises; its stub does not declare so


class SendingRankClient(RemoteRank):
    """Rank 0's calls to another sending rank; for errors see `RemoteRank`."""

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        key: bytes,
        certificates: TransferCertificates | None = None,
    ) -> None:
        self.name = rank_name(rank)
        self._metadata = ((KEY_METADATA, key),)
        self._channel = member_channel(
            join_host_port(host, port), host, certificates, MAX_RANK_MESSAGE_BYTES
        )
        self._calls = services.SendingRankServiceStub(self._channel)
        self._running: dict[int, set[grpc.Future[Any]]] = {}
        self._leaving: set[grpc.Future[Any]] = set()
        self._lock = threading.Lock()

    def join(self, order: JoinOrder, should_stop: threading.Event) -> None:
        spec = order.spec
        request = messages.JoinGroupsRequest(
            epoch=spec.epoch,
            host=spec.host,
            port=spec.port,
            store_key=spec.store_key,
            bucket_bytes=spec.bucket_bytes,
            classes=[
                messages.ShareClass(
                    share=share_to_proto(share), workers=[names[rank] for rank in sorted(names)]
                )
                for share, names in zip(order.shares, order.workers, strict=True)
            ],
        )
        phase = f"forming the transfer groups of epoch {spec.epoch}"
        self._call(
            self._calls.JoinGroups,
            request,
            spec.epoch,
            phase,
            spec.timeout_s + _GRACE_S,
            should_stop,
        )

    def encode(
        self,
        epoch: int,
        bases: Sequence[BaseVersion],
        version: int,
        timeout_s: float,
        should_stop: threading.Event,
    ) -> bool:
        request = messages.EncodeChangesRequest(
            epoch=epoch,
            base_version=bases[0].version,
            policy_version=version,
            base_digests=[base.digest for base in bases],
        )
        phase = f"encoding the changes of version {version}"
        return self._call(
            self._calls.EncodeChanges, request, epoch, phase, timeout_s + _GRACE_S, should_stop
        ).saves

    def send(
        self,
        epoch: int,
        version: int,
        plans: Sequence[TransferPlan | None],
        timeout_s: float,
        should_stop: threading.Event,
        has_changes: bool,
    ) -> list[SentStream]:
        request = messages.SendVersionRequest(
            epoch=epoch, policy_version=version, changes=has_changes
        )
        phase = f"broadcasting version {version} in epoch {epoch}"
        answer = self._call(
            self._calls.SendVersion, request, epoch, phase, timeout_s + _GRACE_S, should_stop
        )
        return [
            NOTHING if plan is None else _sent_stream(plan, stream)
            for plan, stream in zip(plans, answer.streams, strict=True)
        ]

    def probe(self, timeout_s: float) -> None:
        never = threading.Event()
        request = messages.ProbeRequest()
        self._call(self._calls.Probe, request, 0, "answering a probe", timeout_s, never)

    def leave(self, epoch: int, reason: str) -> None:
        request = messages.LeaveGroupsRequest(epoch=epoch, reason=reason)
        leaving = self._calls.LeaveGroups.future(request, timeout=_LEAVE_S, metadata=self._metadata)
        with self._lock:
            self._leaving.add(leaving)  # gRPC cancels a call that nobody holds
            running = tuple(self._running.pop(epoch, ()))  # a call that ends leaves the set
        leaving.add_done_callback(self._forget_call)
        for call in running:
            call.cancel()

    def _forget_call(self, call: grpc.Future[Any]) -> None:
        with self._lock:
            self._leaving.discard(call)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_RequestT, _AnswerT],
        request: _RequestT,
        epoch: int,
        phase: str,
        timeout_s: float,
        should_stop: threading.Event,
    ) -> _AnswerT:
        call = method.future(request, timeout=timeout_s, metadata=self._metadata)
        with self._lock:
            running = self._running.setdefault(epoch, set())
            running.add(call)
        try:
            while True:
                try:
                    return call.result(timeout=_CHECK_EVERY_S)
                except grpc.FutureTimeoutError:
                    if should_stop.is_set():
                        call.cancel()
        except grpc.FutureCancelledError as error:
            raise WeightSyncError(self.name, phase, "given up by rank 0") from error
        except grpc.RpcError as error:
            raise self._error(error, phase, timeout_s) from error
        finally:
            with self._lock:
                running.discard(call)

    def _error(self, error: grpc.RpcError, phase: str, timeout_s: float) -> SluiceError:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(self.name, phase, timeout_s)
        return WeightSyncError(self.name, phase, error.details() or code.name)


def _sent_stream(plan: TransferPlan, stream: messages.SentStream) -> SentStream:
    starts = range(0, len(stream.digests), DIGEST_BYTES)
    parts = tuple(stream.digests[at : at + DIGEST_BYTES] for at in starts)
    return SentStream(WeightDigests(part_names(plan), parts), stream.num_bytes)
