"""A gRPC server with health, reflection, limits, a probe port, and a clear error for a port in
use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from sluice.config.addresses import join_host_port
from sluice.rpc.auth import TokenInterceptor
from sluice.rpc.credentials import OPEN, Credentials, exposure_warning
from sluice.rpc.interceptors import ErrorInterceptor
from sluice.rpc.policy import message_limits
from sluice.rpc.ports import check_bindable, port_in_use

logger = logging.getLogger(__name__)

_STREAMS_PER_CONNECTION = 1_024
# Limits that suit probes.
_LONGEST_PROBE_BYTES, _PROBE_STREAMS = 4096, 16
_KEEPALIVE_MS, _PING_TIMEOUT_MS = 30_000, 10_000

UNIX = "unix:"
"""What the addresses of sockets in the file system begin with."""
Registration = Callable[[grpc.aio.Server], None]


class RpcServer:
    """One listening gRPC server.

    Args:
        registrations: functions that add the service's servicers to the server.
        service_names: full names for health and reflection.
        host: interface to listen on, or ``unix:`` and the path of a socket.
        port: 0 lets the system choose.
        max_message_bytes: largest message either way.
        credentials: what callers must show; without any, every caller is accepted.
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
        """Set the health answer of the whole server and of each of its services."""
        for name in ("", *self._service_names):
            await self.set_named(name, serving=serving)

    async def set_named(self, name: str, *, serving: bool) -> None:
        """Set the health answer of `name`, which may be a part of the work and no service.

        A name is unknown until it is set. `set_serving` does not change names of its own kind, and
        a server that stops answers NOT_SERVING for all.
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

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: ANN401 - untyped in grpc
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
            # Notice a client that vanished, and free its slots.
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
