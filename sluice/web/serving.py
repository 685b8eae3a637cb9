"""Serve an application of aiohttp (the extras `dashboard` and `openai-front`)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from sluice.web.connections import Connections

_IDLE_S = 75.0


@asynccontextmanager
async def serving(
    app: web.Application,
    host: str,
    port: int,
    *,
    most_connections: int,
    shutdown_s: float,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve within the block; yield the port. The handler of a caller that disconnects ends.

    Args:
        app: what answers.
        host: interface to listen on.
        port: 0 lets the system choose one.
        most_connections: open at once; further ones get the status 503 and are closed.
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
        connections = Connections(runner.server, most_connections)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(connections, host, port, ssl=tls)
        try:
            yield int(listener.sockets[0].getsockname()[1])
        finally:
            listener.close()
    finally:
        await runner.cleanup()
