"""Serve an application of aiohttp (the extras `dashboard` and `openai-front`).

The bound on open connections sits between sockets and the HTTP protocol, so that a refused
connection costs only a prepared answer. aiohttp's keep-alive timer, which starts with the
connection, closes idle ones.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

_IDLE_S = 75.0
_BODY = (
    b'{"error":{"message":"too many connections are open; try again in a moment",'
    b'"type":"server_error","param":null,"code":"unavailable"}}'
)
_TURNED_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\nRetry-After: 1\r\n\r\n" % len(_BODY)
) + _BODY


@dataclass(slots=True, eq=False)
class _Connections:
    """The open connections of one server.

    Args:
        make: returns a protocol for each accepted connection.
        max_open: open at once; further ones get the status 503 and are closed.
    """

    make: Callable[[], asyncio.Protocol]
    max_open: int
    num_open: int = field(default=0, init=False)

    def __call__(self) -> asyncio.Protocol:
        """Return a protocol, for `loop.create_server`."""
        return _Connection(self)


class _Connection(asyncio.Protocol):
    """One connection, which `_Connections.make`'s protocol serves if there is capacity."""

    def __init__(self, connections: _Connections) -> None:
        self._connections = connections
        self._inner: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        connections = self._connections
        if connections.num_open >= connections.max_open:
            transport.write(_TURNED_AWAY)
            transport.close()
            return
        connections.num_open += 1
        self._inner = connections.make()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is not None:
            self._connections.num_open -= 1
            self._inner.connection_lost(exc)


@asynccontextmanager
async def serve_http(
    app: web.Application,
    host: str,
    port: int,
    *,
    max_connections: int,
    shutdown_s: float,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve within the block; yield the port. If a caller disconnects, its handler is cancelled.

    Args:
        port: 0 lets the system choose one.
        max_connections: open at once; further ones get the status 503 and are closed.
        shutdown_s: seconds that open requests get at the end of the block.
        tls: ``None``: plain HTTP.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_IDLE_S,
        shutdown_timeout=shutdown_s,
        auto_decompress=False,  # a few bytes may be gigabytes
    )
    await runner.setup()
    try:
        assert runner.server is not None
        connections = _Connections(runner.server, max_connections)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(connections, host, port, ssl=tls)
        try:
            yield int(listener.sockets[0].getsockname()[1])
        finally:
            listener.close()
    finally:
        await runner.cleanup()
