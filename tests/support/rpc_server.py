"""A real gRPC server of ours in this process, with scripted methods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.rpc.client import open_channel
from sluice.rpc.server import RpcServer

REWARD = "sluice.api.reward.v1.RewardService"
TRAINER = "sluice.api.trainer.v1.TrainerService"
LIMIT_BYTES = 1 << 20


def rpc_server(
    *,
    reward: Any = None,
    trainer: Any = None,
    port: int = 0,
    host: str = "127.0.0.1",
    max_message_bytes: int = LIMIT_BYTES,
) -> RpcServer:
    """A server on a free port; methods that are not given answer UNIMPLEMENTED."""
    reward = reward or reward_pb2_grpc.RewardServiceServicer()
    trainer = trainer or trainer_pb2_grpc.TrainerServiceServicer()
    return RpcServer(
        [
            lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, server),
            lambda server: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server),
        ],
        [REWARD, TRAINER],
        host=host,
        port=port,
        max_message_bytes=max_message_bytes,
    )


@asynccontextmanager
async def serving(**arguments: Any) -> AsyncIterator[RpcServer]:
    """`rpc_server`, started for the length of the block."""
    server = rpc_server(**arguments)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(**arguments: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that runs for the length of the block."""
    async with (
        serving(**arguments) as server,
        open_channel(server.address, max_message_bytes=16 * LIMIT_BYTES) as channel,
    ):
        yield channel
