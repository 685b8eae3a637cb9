"""Bound the open connections of an HTTP server.

The bound sits between sockets and the HTTP protocol, so that a refused connection costs only a
prepared answer. aiohttp's keep-alive timer, which starts with the connection, closes idle ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

_BODY = (
    b'{"error":{"message":"too many connections are open; try again in a moment",'
    b'"type":"server_error","param":null,"code":"unavailable"}}'
)
_TURNED_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\nRetry-After: 1\r\n\r\n" % len(_BODY)
) + _BODY


@dataclass(slots=True, eq=False)
class Connections:
    """The open connections of one server.

    Args:
        make: returns a protocol for each accepted connection.
        most: open at once; further ones get the status 503 and are closed.
    """

    make: Callable[[], asyncio.Protocol]
    most: int
    num_open: int = field(default=0, init=False)

    def __call__(self) -> asyncio.Protocol:
        """Return a protocol, for `loop.create_server`."""
        return _Connection(self)


class _Connection(asyncio.Protocol):
    """One connection, which `Connections.make`'s protocol serves if there is capacity."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._inner: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        connections = self._connections
        if connections.num_open >= connections.most:
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
