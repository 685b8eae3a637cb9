"""Bytes that are no message are the caller's error, in calls of every kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.rpc.server import RpcServer

NO_MESSAGE = b"\xff\xff\xff"


async def unary(request: Any, context: Any) -> Any:
    return trainer_pb2.PauseResponse(step=request.ByteSize())


async def stream(requests: Any, context: Any) -> None:
    async for request in requests:
        await context.write(trainer_pb2.PauseResponse(step=request.ByteSize()))


def register(server: Any) -> None:
    coders = {
        "request_deserializer": trainer_pb2.PauseRequest.FromString,
        "response_serializer": trainer_pb2.PauseResponse.SerializeToString,
    }
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, **coders),
        "Stream": grpc.stream_stream_rpc_method_handler(stream, **coders),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.T", handlers),))


@pytest.fixture
async def channel() -> AsyncIterator[Any]:
    server = RpcServer([register], ["test.T"], host="127.0.0.1", port=0, max_message_bytes=1 << 20)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as opened:
        yield opened
    await server.stop(0)


async def test_a_call_with_bytes_that_are_no_message_is_refused(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no message of this method") as caught:
        await channel.unary_unary("/test.T/Unary")(NO_MESSAGE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await channel.unary_unary("/test.T/Unary")(b"") == b""


async def test_a_stream_with_bytes_that_are_no_message_is_refused(channel: Any) -> None:
    async def sent() -> AsyncIterator[bytes]:
        yield b""
        yield NO_MESSAGE

    call = channel.stream_stream("/test.T/Stream")(sent())
    with pytest.raises(grpc.aio.AioRpcError, match="no message of this method") as caught:
        [answer async for answer in call]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
