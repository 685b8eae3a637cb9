"""A gRPC server with health, reflection, limits, a probe port, and a clear error for a port in use.

Its interceptor turns exceptions into statuses, malformed requests into errors of the caller, and
ends open streams whose token is not valid any more.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from sluice.config.addresses import join_host_port
from sluice.errors import InvalidRequestError, SluiceError, leaves
from sluice.rpc.auth import TokenInterceptor
from sluice.rpc.credentials import OPEN, Credentials, exposure_warning
from sluice.rpc.policy import message_limits
from sluice.rpc.ports import check_bindable, port_in_use
from sluice.rpc.status import RPC_ERRORS, short_method, status_of

logger = logging.getLogger(__name__)

_STREAMS_PER_CONNECTION = 1_024
# Limits that suit probes.
_LONGEST_PROBE_BYTES, _PROBE_STREAMS = 4096, 16
_KEEPALIVE_MS, _PING_TIMEOUT_MS = 30_000, 10_000

# ruff: noqa: ANN401 - gRPC does not type its handlers

Check = Callable[[], None]
UNIX = "unix:"
"""The prefix of addresses of Unix sockets."""
Registration = Callable[[grpc.aio.Server], None]


class RpcServer:
    """One listening gRPC server.

    Args:
        registrations: functions that add the service's servicers to the server.
        service_names: full names for health and reflection.
        host: interface to listen on, or ``unix:`` and the path of a socket.
        port: 0 lets the system choose.
        max_message_bytes: largest message either way.
        credentials: the credentials required of callers; without any, every caller is accepted.
        health_port: port that serves health alone, unencrypted; 0: none.
    """

    def __init__(
        self,
        registrations: Sequence[Registration],
        service_names: Sequence[str],
        *,
        host: str,
        port: int,
        max_message_bytes: int,
        credentials: Credentials = OPEN,
        health_port: int = 0,
    ) -> None:
        self._host = host
        self._requested_port = port
        self._credentials = credentials
        self._service_names = tuple(service_names)
        self._server = _server(
            max_message_bytes, _STREAMS_PER_CONNECTION, _interceptors(credentials)
        )
        for register in registrations:
            register(self._server)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server
        )
        self._health_port = health_port
        self._probed: grpc.aio.Server | None = None
        if health_port:  # with mutual TLS a kubelet could not probe the main port
            self._probed = _server(_LONGEST_PROBE_BYTES, _PROBE_STREAMS)
            health_pb2_grpc.add_HealthServicer_to_server(_ChecksOnly(self._health), self._probed)
        self.port = 0

    @property
    def address(self) -> str:
        """Return host:port of the bound socket."""
        is_local = self._host.startswith(UNIX)
        return self._host if is_local else join_host_port(self._host, self.port)

    async def start(self, *, serving: bool = True) -> None:
        """Bind and serve.

        Raises:
            ConfigError: the port is taken or the interface does not exist.
        """
        self.port = _bind(self._server, self._host, self._requested_port, self._credentials)
        await self._server.start()
        if self._probed is not None:
            _bind(self._probed, self._host, self._health_port, credentials=OPEN)
            await self._probed.start()
        await self.set_serving(serving=serving)
        logger.info("listening on %s", self.address)
        if self._host.startswith(UNIX):
            return  # the folder's rights decide who may call
        if risk := exposure_warning(self._host, self._credentials):
            logger.warning("%s: %s", self.address, risk)

    async def set_serving(self, *, serving: bool) -> None:
        """Set the health status of the whole server and of each of its services."""
        for name in ("", *self._service_names):
            await self.set_named(name, serving=serving)

    async def set_named(self, name: str, *, serving: bool) -> None:
        """Set the health status of `name`, which need not be a service.

        A name is unknown until it is set. `set_serving` does not change one that is no service,
        and a server that stops answers NOT_SERVING for all.
        """
        states = health_pb2.HealthCheckResponse
        await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end for `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        if self._probed is not None:
            await self._probed.stop(0)


class _ChecksOnly(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped in grpc
    """A health service with `Check` but without `Watch`, whose callers could keep streams open."""

    def __init__(self, health: HealthServicer) -> None:
        self._health = health

    async def Check(self, request: Any, context: Any) -> Any:
        return await self._health.Check(request, context)


def _server(
    max_message_bytes: int,
    streams: int,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Return a server that accepts `streams` calls at once of each connection."""
    return grpc.aio.server(
        interceptors=interceptors,
        options=[
            *message_limits(max_message_bytes),
            # Otherwise two processes could bind the same port and share its calls.
            ("grpc.so_reuseport", 0),
            # Peers ping every 10 s (`open_channel`), also between calls. The default limits would
            # close their connections.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            # Detect vanished clients, to free their slots.
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.max_concurrent_streams", streams),
        ],
    )


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: Credentials) -> int:
    """Return the bound port. Raise ConfigError with the reason if there is none."""
    if host.startswith(UNIX):
        return server.add_insecure_port(host)
    check_bindable(host, port)
    address = join_host_port(host, port)
    try:
        if credentials.is_encrypted:
            return server.add_secure_port(address, credentials.for_server())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise port_in_use(host, port) from error


def _interceptors(credentials: Credentials) -> tuple[grpc.aio.ServerInterceptor, ...]:
    if (tokens := credentials.tokens) is None:
        return (ErrorInterceptor(),)
    # The token comes first: without one, not even an error shows which methods exist.
    admission = TokenInterceptor(tokens)
    return (admission, ErrorInterceptor(admission.open_call_check))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps domain errors to statuses by the table; other errors become an opaque INTERNAL.

    Malformed requests become errors of the caller. Open streams end once their token is invalid.

    Args:
        check_of: returns the check of one call, which each message of its streams must pass.
    """

    def __init__(
        self, check_of: Callable[[grpc.HandlerCallDetails], Check] = lambda _call: lambda: None
    ) -> None:
        self._check_of = check_of

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        requests = "stream" if handler.request_streaming else "unary"
        responses = "stream" if handler.response_streaming else "unary"
        kind = f"{requests}_{responses}"
        call = _GuardedCall(
            getattr(handler, kind),
            handler_call_details.method,
            self._check_of(handler_call_details),
        )
        is_generator = inspect.isasyncgenfunction(call.inner)
        return handler._replace(
            request_deserializer=_lenient_decoder(handler.request_deserializer),
            **{kind: call.stream if is_generator else call.answer},
        )


@dataclass(frozen=True, slots=True)
class _GuardedCall:
    """A method that turns errors into statuses."""

    inner: Callable[..., Any]
    method: str
    check: Check

    async def answer(self, request: Any, context: Any) -> Any:
        """Return the answer of a coroutine, which may also write messages to the context."""
        try:
            return await self.inner(
                self._check_request(request), _CheckedContext(context, self.check)
            )
        except (grpc.aio.AbortError, asyncio.CancelledError):  # the call has ended already
            raise
        except Exception as error:  # noqa: BLE001  the boundary where errors become statuses
            return await _abort(context, self.method, error)

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yield the messages of an asynchronous generator."""
        try:
            async with aclosing(self.inner(self._check_request(request), context)) as messages:
                async for message in messages:
                    self.check()
                    yield message
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):  # ended already
            raise
        except Exception as error:  # noqa: BLE001  the boundary where errors become statuses
            await _abort(context, self.method, error)

    def _check_request(self, request: Any) -> Any:
        # Malformed bytes must fail inside the guard, or gRPC would answer an opaque INTERNAL.
        return (
            self._check_each(request)
            if hasattr(request, "__aiter__")
            else _decoded_message(request)
        )

    async def _check_each(self, requests: Any) -> AsyncIterator[Any]:
        async for request in requests:
            self.check()
            yield _decoded_message(request)


class _CheckedContext:
    """A call's context that checks the token before each message it writes."""

    def __init__(self, context: Any, check: Check) -> None:
        self._context = context
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        self._check()
        await self._context.write(message)


@dataclass(frozen=True, slots=True)
class _MalformedRequest:
    """A stand-in for bytes that are no message."""

    num_bytes: int
    reason: str


def _lenient_decoder(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a decoder that returns a `_MalformedRequest` for bytes that `decode` refuses."""
    if decode is None:
        return None

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except (DecodeError, ValueError, RecursionError) as error:
            return _MalformedRequest(len(data), str(error)[:200])

    return decoded


def _decoded_message(request: Any) -> Any:
    """Return the message. Raise InvalidRequestError if its bytes cannot be decoded."""
    if isinstance(request, _MalformedRequest):
        raise InvalidRequestError(
            f"request: its {request.num_bytes} bytes are no message of this method "
            f"({request.reason}); use the protocol files of the service's version"
        )
    return request


async def _abort(context: Any, method: str, error: Exception) -> None:
    """End the call with the first of sluice's errors; log all other errors of a group."""
    # A caller can act on one error; a group of tasks may have raised several.
    inner = leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    own_error = next((e for e in inner if isinstance(e, SluiceError)), None)
    for unexpected in inner:
        if not isinstance(unexpected, SluiceError):
            kind = type(unexpected).__name__
            logger.error("%s: unexpected %s", method, kind, exc_info=unexpected)
    status = status_of(own_error) if own_error is not None else None
    code = grpc.StatusCode.INTERNAL if status is None else status.code
    RPC_ERRORS.add("server", short_method(method), code.name)
    if status is not None:
        await context.abort(*status)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error in {method}; see its log")
