"""What health costs, and whom: callers without a token get one short check at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from unittest.mock import AsyncMock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.rpc import auth
from sluice.rpc.auth import HEALTH_CHECK, LONGEST_CHECK_BYTES
from sluice.rpc.client import open_channel
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.server import RpcServer
from tests.support.certified import ACCEPTED, CLIENT_TOKEN, bearing
from tests.support.rpc_server import LIMIT_BYTES, REWARD

SERVING = health_pb2.HealthCheckResponse.SERVING
WATCH = "/grpc.health.v1.Health/Watch"
EXHAUSTED, UNAUTHENTICATED = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
)


class Served(NamedTuple):
    """Where a server with tokens listens, and where it answers probes."""

    address: str
    probes: str


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        health_port = held.getsockname()[1]
    server = RpcServer(
        [],
        [REWARD],
        host="127.0.0.1",
        port=0,
        max_message_bytes=LIMIT_BYTES,
        credentials=Credentials(tokens=ACCEPTED),
        health_port=health_port,
    )
    await server.start()
    try:
        yield Served(server.address, f"127.0.0.1:{health_port}")
    finally:
        await server.stop(0)


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


def opened(address: str, credentials: Credentials = OPEN) -> grpc.aio.Channel:
    return open_channel(address, max_message_bytes=LIMIT_BYTES, credentials=credentials)


async def check(channel: grpc.aio.Channel, service: str = REWARD) -> Any:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status


async def refusal(awaitable: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await awaitable
    return refused.value.code()


async def first(call: Any) -> Any:
    return await anext(aiter(call))


def watching(channel: grpc.aio.Channel) -> Any:
    request = health_pb2.HealthCheckRequest(service=REWARD)
    return health_pb2_grpc.HealthStub(channel).Watch(request, timeout=60)


async def test_watching_health_needs_a_token_of_any_role(server: Served) -> None:
    async with opened(server.address) as stranger:
        assert await refusal(first(watching(stranger))) is UNAUTHENTICATED
    async with opened(server.address, Credentials(tokens=bearing(CLIENT_TOKEN))) as client:
        assert (await first(watching(client))).status == SERVING


async def test_a_check_is_answered_up_to_its_limit_and_refused_beyond(server: Served) -> None:
    async with opened(server.address) as stranger:
        assert await check(stranger) == SERVING
        longest = LONGEST_CHECK_BYTES - 3  # a tag and a length of two bytes
        assert await refusal(check(stranger, "x" * longest)) is grpc.StatusCode.NOT_FOUND
        assert await refusal(check(stranger, "x" * (longest + 1))) is EXHAUSTED
        malformed = stranger.unary_unary(HEALTH_CHECK)(b"\xff\xff", timeout=60)
        assert await refusal(malformed) is grpc.StatusCode.INVALID_ARGUMENT


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def at_once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def limits(monkeypatch: pytest.MonkeyPatch, max_open: int, read_within_s: float) -> None:
    monkeypatch.setattr(auth, "MAX_OPEN_CHECKS", max_open)
    monkeypatch.setattr(auth, "_READ_WITHIN_S", read_within_s)


async def note_end(call: Any, ended: asyncio.Queue[grpc.StatusCode]) -> None:
    ended.put_nowait(await call.code())


async def test_idle_checks_end_when_honest_ones_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits(monkeypatch, 4, 600.0)
    async with serving() as server, opened(server.address) as stranger:
        idle = [stranger.stream_unary(HEALTH_CHECK)(never(), timeout=600) for _ in range(5)]
        ended: asyncio.Queue[grpc.StatusCode] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            for call in idle:
                tasks.create_task(note_end(call, ended))
            assert await asyncio.wait_for(ended.get(), 30) is EXHAUSTED
            async with opened(server.address) as probe:
                assert await check(probe) == SERVING
            for call in idle:
                call.cancel()


async def test_a_check_that_has_just_used_its_time_up_costs_the_next_one_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits(monkeypatch, 1, 0.0)
    checks, refused = auth.BoundedChecks(), AsyncMock()

    async def read_slowly() -> None:
        with pytest.raises(TimeoutError):
            await checks._read(never(), refused)

    async with asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(read_slowly())
        while not checks._open or not checks._open[0].expired():
            await asyncio.sleep(0)
        monkeypatch.setattr(auth, "_READ_WITHIN_S", 60.0)
        assert await checks._read(at_once(b"check"), refused) == b"check"
        assert not slow.done()
    refused.abort.assert_awaited_once()


async def test_a_check_that_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, 64, 0.05)
    async with serving() as server, opened(server.address) as stranger:
        assert await refusal(stranger.stream_unary(HEALTH_CHECK)(never(), timeout=60)) is EXHAUSTED


async def test_the_port_for_probes_takes_short_checks_and_nobody_who_watches(
    server: Served,
) -> None:
    async with opened(server.probes) as probe:
        assert await check(probe) == SERVING
        assert await refusal(first(watching(probe))) is grpc.StatusCode.UNIMPLEMENTED
        assert await refusal(check(probe, "x" * 5000)) is EXHAUSTED
