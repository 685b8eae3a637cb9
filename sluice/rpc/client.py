"""Call peers: stubs, channels that detect frozen peers, deadlines and retries from the table, and
sluice's errors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

import grpc

from sluice.api.environment.v1 import environment_pb2_grpc
from sluice.api.launch.v1 import launch_pb2_grpc
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.api.weights.v1 import weights_pb2_grpc
from sluice.concurrency.waits import waiting_for
from sluice.errors import SluiceError
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.metadata import AUTHORIZATION, call_options
from sluice.rpc.policy import CALL_POLICIES, message_limits, policy_key
from sluice.rpc.status import CLASS_KEY, RPC_ERRORS, error_of

if TYPE_CHECKING:
    from google.protobuf.message import Message

Metadata = tuple[tuple[str, str], ...]

# A frozen peer is noticed within 15 s.
_KEEPALIVE_MS = 10_000
_PING_TIMEOUT_MS = 5_000

NOBODY = "unix:/dev/null"
"""An address on which nothing listens, for `call_after_backlog`."""
_PLACES_OF_A_START = 3
"""A stream's first message is the third thing of it that comes, after "sent" and the metadata."""
_PLACE_S = 0.2
"""gRPC's threads may take as long to read what lies in sockets, after the process was stopped."""

RequestT = TypeVar("RequestT", contravariant=True)
ResponseT = TypeVar("ResponseT", covariant=True)


_Channel = grpc.aio.Channel
# The generated classes serve sync and async channels, but have the types of sync ones.
rollout_stub = cast(
    "Callable[[_Channel], rollout_pb2_grpc.RolloutServiceAsyncStub]",
    rollout_pb2_grpc.RolloutServiceStub,
)
weight_sync_stub = cast(
    "Callable[[_Channel], weights_pb2_grpc.WeightSyncServiceAsyncStub]",
    weights_pb2_grpc.WeightSyncServiceStub,
)
reward_stub = cast(
    "Callable[[_Channel], reward_pb2_grpc.RewardServiceAsyncStub]",
    reward_pb2_grpc.RewardServiceStub,
)
environment_stub = cast(
    "Callable[[_Channel], environment_pb2_grpc.EnvironmentServiceAsyncStub]",
    environment_pb2_grpc.EnvironmentServiceStub,
)
launch_stub = cast(
    "Callable[[_Channel], launch_pb2_grpc.LaunchServiceAsyncStub]",
    launch_pb2_grpc.LaunchServiceStub,
)
trainer_stub = cast(
    "Callable[[_Channel], trainer_pb2_grpc.TrainerServiceAsyncStub]",
    trainer_pb2_grpc.TrainerServiceStub,
)

# ruff: noqa: ANN401 - grpc.aio.Channel is typed with Any


class _SendingChannel:
    """A channel whose calls send further metadata.

    gRPC's own call credentials work only over TLS, and its client interceptors wrap the call
    objects. This class returns what the channel returns.

    Args:
        channel: the wrapped channel; closed with this one.
        further: returns the metadata of a call at the time of the call.
    """

    def __init__(self, channel: grpc.aio.Channel, further: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._further = further

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._channel, name)
        is_method = name in {"unary_unary", "unary_stream", "stream_unary", "stream_stream"}
        return self._sending(member) if is_method else member

    def _sending(self, make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        def method(*arguments: Any, **options: Any) -> Callable[..., Any]:
            inner = make(*arguments, **options)

            def call(*arguments: Any, metadata: Metadata | None = None, **options: Any) -> Any:
                return inner(*arguments, metadata=(*(metadata or ()), *self._further()), **options)

            return call

        return method


def open_channel(
    address: str,
    *,
    max_message_bytes: int,
    credentials: Credentials = OPEN,
    metadata: Callable[[], Metadata] = tuple,
) -> grpc.aio.Channel:
    """Return a channel. The caller closes it.

    Args:
        address: host:port of the peer.
        max_message_bytes: largest message either way.
        credentials: a certificate, and a token sent with each call.
        metadata: returns further metadata of each call, such as the caller's name.
    """
    options: list[tuple[str, int | str]] = [
        *message_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        # Below a minute the keepalive timeout has no effect without the ping timeout.
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # By default the backoff grows to two minutes, far longer than a service takes to restart.
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
    ]
    channel = _connect(address, options, credentials)

    def further() -> Metadata:
        if (tokens := credentials.tokens) is None:
            return metadata()
        return (*metadata(), (AUTHORIZATION, f"Bearer {tokens.tokens()[0].secret}"))

    return cast("grpc.aio.Channel", _SendingChannel(channel, further))


def _connect(
    address: str, options: list[tuple[str, int | str]], credentials: Credentials
) -> grpc.aio.Channel:
    if not credentials.is_encrypted:
        return grpc.aio.insecure_channel(address, options=options)
    if credentials.server_name is not None:
        options = [*options, ("grpc.ssl_target_name_override", credentials.server_name)]
    return grpc.aio.secure_channel(address, credentials.for_channel(), options=options)


class ChannelPool:
    """One channel to each address, opened at its first use. Close it after use.

    Takes the arguments of `open_channel`.
    """

    def __init__(
        self,
        max_message_bytes: int,
        credentials: Credentials = OPEN,
        metadata: Callable[[], Metadata] = tuple,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._credentials = credentials
        self._metadata = metadata
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._num_users = Counter[str]()
        self._retained: frozenset[str] = frozenset()

    def to(self, address: str) -> grpc.aio.Channel:
        """Return the channel to host:port."""
        if address not in self._channels:
            self._channels[address] = open_channel(
                address,
                max_message_bytes=self._max_message_bytes,
                credentials=self._credentials,
                metadata=self._metadata,
            )
        return self._channels[address]

    def acquire(self, address: str) -> grpc.aio.Channel:
        """Return the channel, which then stays open until `release`."""
        channel = self.to(address)
        self._num_users[address] += 1
        return channel

    async def release(self, address: str) -> None:
        """Close the channel after its last user, unless its address is retained."""
        self._num_users[address] -= 1
        await self._close_unused(address)

    async def retain(self, addresses: Collection[str]) -> None:
        """Close the channels to all other addresses, each after its last user."""
        self._retained = frozenset(addresses)
        for address in list(self._channels):
            await self._close_unused(address)

    async def close(self) -> None:
        """Close all channels, which cancels their calls."""
        channels, self._channels = list(self._channels.values()), {}
        self._retained = frozenset()
        for channel in channels:
            await channel.close()

    async def _close_unused(self, address: str) -> None:
        # Closing a channel in use would cancel its calls, which reads like our own cancellation.
        if self._num_users[address] or address in self._retained:
            return
        del self._num_users[address]
        if (channel := self._channels.pop(address, None)) is not None:
            await channel.close()


class UnaryMethod(Protocol[RequestT, ResponseT]):
    """A stub's unary method."""

    def __call__(
        self,
        request: RequestT,
        /,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Awaitable[ResponseT]:
        """Start the call."""
        ...


class StreamCall(Protocol[ResponseT]):
    def __aiter__(self) -> AsyncIterator[ResponseT]: ...
    def read(self) -> Awaitable[object]: ...  # the next message, at the end grpc.aio.EOF
    def cancel(self) -> bool: ...


async def unary_call(
    method: UnaryMethod[RequestT, ResponseT],
    request: RequestT,
    *,
    peer: str,
    phase: str,
    deadline_s: float | None = None,
) -> ResponseT:
    """Call a unary method of a stub and return its answer.

    Args:
        method: a method of the service to which the request's type belongs; see `policy_key`.
        peer: the called process, for errors.
        phase: the purpose of the call, for errors ("taking a batch").
        deadline_s: seconds per try; None for the table's.

    Raises:
        SluiceError: as mapped by `sluice.rpc.status`.
    """
    name = policy_key(cast("Message", request))
    policy = CALL_POLICIES[name]
    seconds = policy.deadline_s if deadline_s is None else deadline_s
    for attempt in range(policy.attempts):
        try:
            with waiting_for(peer, phase):
                return await method(request, timeout=seconds, **call_options())
        except grpc.aio.AioRpcError as error:
            RPC_ERRORS.add("client", name, error.code().name)
            # Only UNAVAILABLE promises that another try may find the peer.
            is_last = attempt + 1 == policy.attempts
            if is_last or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise _translate_error(error, peer, phase, seconds) from error
        await asyncio.sleep(policy.backoff_s * 2**attempt)
    raise AssertionError("a policy has at least one attempt")


async def stream_call(
    method: Callable[..., StreamCall[ResponseT]],
    request: object,
    *,
    peer: str,
    phase: str,
    name: str | None = None,
    deadline_s: float | None = None,
    traceparent: str = "",
) -> AsyncGenerator[ResponseT, None]:
    """Call a server-streaming method and yield its messages. Leaving early cancels the call.

    Consume it inside `contextlib.aclosing`. Takes the arguments and raises the errors of
    `unary_call`, but a stream of requests needs a `name`, its key in `CALL_POLICIES`, and
    `traceparent` (W3C) replaces the current span as the caller's. Streams are never retried.
    """
    name = name or policy_key(cast("Message", request))
    seconds = CALL_POLICIES[name].deadline_s if deadline_s is None else deadline_s
    call = method(request, timeout=seconds, **call_options(traceparent))
    try:
        with waiting_for(peer, phase) as wait:
            # Not "async for": its iterator holds a message until the next one comes, and so would
            # this variable. A reward service waits in thousands of streams.
            while (message := await call.read()) is not grpc.aio.EOF:
                wait.restart()
                yield cast("ResponseT", message)
                del message
                wait.restart()
    except grpc.aio.AioRpcError as error:
        RPC_ERRORS.add("client", name, error.code().name)
        raise _translate_error(error, peer, phase, seconds) from error
    finally:
        # Without this the peer would keep working for a consumer that left early.
        call.cancel()


def call_after_backlog(
    idle_channel: grpc.aio.Channel, callback: Callable[[], None], places: int = _PLACES_OF_A_START
) -> None:
    """Call `callback` after everything that peers have sent by now is delivered; never if
    `idle_channel` closes.

    All events of a process's calls wait in one queue, gRPC's completion queue, one event per call
    at a time. A busy event loop is late by the whole queue, although its timers are not. So make a
    call to nobody: its end, by timeout, also waits in that queue.
    """
    method: Callable[..., grpc.aio.Call] = idle_channel.unary_unary("/sluice/Nothing")

    def ended(call: grpc.aio.Call) -> None:
        if call.cancelled():
            return
        if places > 1:
            call_after_backlog(idle_channel, callback, places - 1)
        else:
            callback()

    method(b"", timeout=_PLACE_S, wait_for_ready=True).add_done_callback(ended)


def _translate_error(
    error: grpc.aio.AioRpcError, peer: str, phase: str, deadline_s: float
) -> SluiceError:
    # A status from gRPC itself, or from another implementation, has no class.
    metadata = error.trailing_metadata()
    name = metadata.get(CLASS_KEY) if metadata is not None else None
    return error_of(
        error.code(),
        error.details() or "",
        name if isinstance(name, str) else None,
        peer=peer,
        phase=phase,
        deadline_s=deadline_s,
    )
