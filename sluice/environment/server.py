"""Serve an environment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sluice.api.environment.v1 import environment_pb2_grpc
from sluice.environment.episodes import AuthorCalls, Environment
from sluice.environment.servicer import EnvironmentServicer
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.server import RpcServer

SERVICE = "sluice.api.environment.v1.EnvironmentService"
MAX_MESSAGE_BYTES = 64 << 20


@asynccontextmanager
async def serving(
    world: Environment, host: str, port: int, credentials: Credentials = OPEN
) -> AsyncIterator[str]:
    """Serve for the length of the block; yield the address.

    Args:
        world: the environment.
        host: to listen on, or ``unix:`` and a path.
        port: 0 lets the system choose.
        credentials: what callers show.

    Raises:
        ConfigError: the port is taken, or the interface does not exist.
    """
    calls = AuthorCalls()
    async with asyncio.TaskGroup() as tasks:
        servicer = EnvironmentServicer(world, tasks, calls)
        server = RpcServer(
            [
                lambda found: environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(
                    servicer, found
                )
            ],
            [SERVICE],
            host=host,
            port=port,
            max_message_bytes=MAX_MESSAGE_BYTES,
            credentials=credentials,
        )
        await server.start()
        try:
            yield server.address
        finally:
            await server.stop(0)
            await servicer.close()
            calls.close()
