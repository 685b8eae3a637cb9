"""Connections to the HTTP front: bounded in number, and closed where nothing is asked on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

pytest.importorskip("aiohttp")


from sluice import web as serving
from sluice.openai_server.web_app import OpenAIServerSettings
from sluice.rpc.status import CLASS_KEY
from tests.support.http_front import HttpFront, http_front
from tests.support.token_replica import TokenReplica, token_replicas, until

COMPLETION = "/v1/completions"
ASKED = {"model": "policy", "prompt": "a"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
IDLE_S = 0.3
HELD_S = 240.0


@asynccontextmanager
async def connected(
    front: HttpFront,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = front.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """A whole answer."""
    writer.write(HEALTH)
    return await reader.readuntil(b"}")


async def test_connections_beyond_the_limit_get_503_and_are_closed() -> None:
    settings = OpenAIServerSettings(max_connections=2)
    async with http_front("127.0.0.1:1", settings=settings) as front, asyncio.timeout(60):
        async with connected(front) as first, connected(front) as second:
            for each in (first, second):
                assert b" 200 " in await asked(*each)
            async with connected(front) as (reader, _):
                reported = await reader.read()  # to the end: it is closed
            assert reported.startswith(b"HTTP/1.1 503 ")
            assert b'"code":"unavailable"' in reported
            assert b" 200 " in await asked(*first)
        await _until_served(front)


async def _until_served(front: HttpFront) -> None:
    """Places of connections that have ended are free for others."""
    while True:
        async with connected(front) as (reader, writer):
            if b" 200 " in await asked(reader, writer):
                return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEALTH, HEALTH + b"GET /hea"])
async def test_a_connection_on_which_nothing_whole_is_asked_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_IDLE_S", IDLE_S)
    async with (
        http_front("127.0.0.1:1") as front,
        asyncio.timeout(60),
        connected(front) as (reader, writer),
    ):
        writer.write(sent)
        await _read_to_its_end(reader)


async def test_a_head_that_dribbles_in_does_not_keep_a_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "_IDLE_S", IDLE_S)
    async with (
        http_front("127.0.0.1:1") as front,
        asyncio.timeout(60),
        connected(front) as (reader, writer),
        asyncio.TaskGroup() as tasks,
    ):
        dribbling = tasks.create_task(_dribble(writer))
        await _read_to_its_end(reader)
        dribbling.cancel()


async def _dribble(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /health HTTP/1.1\r\n")
    for number in range(10_000):
        writer.write(f"X-{number}: y\r\n".encode())
        await asyncio.sleep(IDLE_S / 10)


async def _read_to_its_end(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1000):
            pass
    except ConnectionError:
        return


async def test_a_request_that_is_being_answered_is_not_idle(
    monkeypatch: pytest.MonkeyPatch, skip_time: Callable[[float], None]
) -> None:
    monkeypatch.setattr(serving, "_IDLE_S", 25.0)
    replica = TokenReplica(hangs_after=0)
    async with (
        token_replicas(replica) as addresses,
        http_front(*addresses) as front,
        asyncio.timeout(HELD_S),
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(front.post(COMPLETION, **ASKED))
        await until(lambda: bool(replica.requests))
        skip_time(50.0)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        assert not replica.cancelled.is_set()
        waiting.cancel()


class FullReplica(TokenReplica):
    """Refuses every request, and so many seconds pass with each: fewer than a stalled call has."""

    skip_time: Callable[[float], None]

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        self.skip_time(25.0)
        kind = ((CLASS_KEY, "ExhaustedError"),)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        await context.abort(code, "the queue is full", trailing_metadata=kind)


async def test_a_deadline_that_passed_while_all_was_full_is_reported_as_full(
    skip_time: Callable[[float], None],
) -> None:
    replica = FullReplica()
    replica.skip_time = skip_time
    async with (
        token_replicas(replica) as addresses,
        http_front(*addresses, settings=OpenAIServerSettings(deadline_s=200.0)) as front,
        asyncio.timeout(HELD_S),
    ):
        status, answer = await front.post(COMPLETION, **ASKED)
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(replica.requests) > 1
