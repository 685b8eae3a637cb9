"""A port where health answers without credentials, and nothing else."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from sluice.config.host_port import join_host_port
from sluice.rpc.bound_socket import check_bindable, port_in_use
from sluice.rpc.channel import message_limits
from sluice.rpc.health_check import ChecksOnly

_LONGEST_MESSAGE_BYTES = 4096
_STREAMS_PER_CONNECTION = 16
_KEEPALIVE_MS, _PING_TIMEOUT_MS = 30_000, 10_000


class ProbeServer:
    """Serves `Check` unencrypted, with limits that suit probes.

    Args:
        health: the servicer that knows the answers.
        host: interface to listen on.
        port: where.
    """

    def __init__(self, health: Any, host: str, port: int) -> None:  # noqa: ANN401  untyped in grpc
        self._host, self._port = host, port
        self._server = grpc.aio.server(
            options=[
                *message_limits(_LONGEST_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
                ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
                ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(ChecksOnly(health), self._server)

    async def start(self) -> None:
        """Binds and serves.

        Raises:
            ConfigError: the port is taken or the interface does not exist.
        """
        check_bindable(self._host, self._port)
        try:
            self._server.add_insecure_port(join_host_port(self._host, self._port))
        except RuntimeError as error:
            raise port_in_use(self._host, self._port) from error
        await self._server.start()

    async def stop(self) -> None:
        """Ends at once."""
        await self._server.stop(0)
