"""What the fuzz notes of a front that answers late, or not at all."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from tools.fuzz.front_traffic import FrontTraffic
from tools.fuzz.traffic import Traffic

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("answered", "stays_open", "code", "crashes"),
    [
        (HEAD, True, "HTTP late", 0),
        (HEAD, False, "HTTP disconnected", 3),
        (b"", False, "HTTP disconnected", 3),
        (b"nonsense\r\n\r\n", False, "HTTP unreadable", 0),
    ],
)
async def test_a_front_that_breaks_is_counted_and_does_not_end_the_fuzz(
    answered: bytes,
    code: str,
    crashes: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stays_open: bool,
) -> None:
    monkeypatch.setattr("tools.fuzz.traffic._FRONT_SHARE", 1.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answered)
        if stays_open:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    limit = aiohttp.ClientTimeout(total=0.5)
    async with (
        server,
        aiohttp.ClientSession(f"http://{host}:{port}", timeout=limit) as session,
    ):
        rng = random.Random(0)
        traffic = Traffic({}, rng, FrontTraffic(session, rng))
        await traffic.send(3, in_flight=1)
    assert dict(traffic.codes) == {code: 3}
    assert traffic.crashes == len(traffic.examples) == crashes
