"""The HTTP front under callers that mean no good, or that stall: refused, and others served."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import socket
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp

from sluice.client import AsyncClient, RunAddress
from sluice.openai_server import web_app
from sluice.openai_server.web_app import OpenAIServer, OpenAIServerSettings, listening
from sluice.security.token_file import GivenToken
from tests.support.http_front import HttpFront, http_front
from tests.support.token_replica import TokenReplica, token_replicas, until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
KEY = "k" * 20
WHOLE = "[0][1][2][3][4][5]"
ASKED = {"model": "policy", "prompt": "a"}
DEEP = b"[" * 100_000 + b"]" * 100_000


async def posted(
    front: HttpFront, body: bytes, path: str = COMPLETION, **headers: str
) -> tuple[int, Any]:
    sent = {"Content-Type": "application/json", **headers}
    async with front.session.post(
        f"{front.base_url}{path}", data=io.BytesIO(body), headers=sent
    ) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 400),
        (b'{"model": "policy", "prompt": "\xff"}', 400),
        (b'{"model": "policy", "prompt": "\\ud800"}', 400),
        (b'{"model": "policy", "prompt": "a", "other": ' + DEEP + b"}", 400),
        (b'{"model": "policy", "prompt": ' + b"9" * 100_000 + b"}", 400),
        (b" " * (17 << 20), 413),
    ],
    ids=["empty", "cut", "list", "bytes", "surrogate", "deep", "digits", "large"],
)
async def test_a_body_that_is_no_request_is_refused_in_the_dialects_shape(
    body: bytes, status: int
) -> None:
    async with http_front("127.0.0.1:1") as front:
        found, answer = await posted(front, body)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(answer["error"]["message"]) < 500


@pytest.mark.parametrize("path", ["/s/lease/end", "/s/lease/v1/chat/completions"])
@pytest.mark.parametrize(
    "body", [b"{", b"[1]", b'{"failure": "\xff", "model": "\xff"}', b'{"reward": ' + DEEP + b"}"]
)
async def test_a_body_for_a_lease_that_is_no_request_is_refused(path: str, body: bytes) -> None:
    async with http_front("127.0.0.1:1") as front:
        found, answer = await posted(front, body, path)
    assert found == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_fields_that_callers_make_up_do_not_fill_log_and_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with http_front("127.0.0.1:1") as front:
        for number in range(100):
            names = {f"{number} {each} {'x' * 100}": 1 for each in range(20)}
            await front.post("/s/lease/v1/chat/completions", **names)
    noted = [one for one in caplog.messages if "agents send" in one]
    assert 1 <= len(noted) <= 32
    assert max(map(len, noted)) < 32 * 70


async def test_a_tools_schema_that_is_no_text_is_refused_in_the_dialects_shape() -> None:
    tool = b'{"type": "function", "function": {"name": "f", "parameters": {"a": "\xff"}}}'
    turns = b'"messages": [{"role": "user", "content": "a"}]'
    async with http_front("127.0.0.1:1") as front:
        body = b'{"model": "policy", ' + turns + b', "tools": [' + tool + b"]}"
        found, answer = await posted(front, body, CHAT)
    assert found == 400
    assert "utf-8" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1 << 40),
        ("top_k", 1 << 40),
        ("top_k", -2),
        ("temperature", 1e300),
        ("top_p", -1.0),
        ("priority", 101),
        ("seed", 1 << 64),
        ("n", 1025),
        ("stop", ["x"] * 17),
        ("prompt", [-1]),
        ("prompt", [1 << 32]),
        ("model", "x" * 1_000_000),
    ],
)
async def test_a_field_out_of_its_range_is_refused_by_its_name(field: str, value: object) -> None:
    replica = TokenReplica()
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        status, answer = await front.post(COMPLETION, **{**ASKED, field: value})
    assert status in (400, 404)
    assert answer["error"]["message"].startswith(f"{field}: ")
    assert len(answer["error"]["message"]) < 500
    assert not replica.requests


async def test_choices_of_all_prompts_are_bounded_together() -> None:
    async with http_front("127.0.0.1:1") as front:
        status, answer = await front.post(COMPLETION, model="policy", prompt=["a"] * 129, n=8)
    assert (status, answer["error"]["param"]) == (400, "n")


async def test_a_compressed_body_is_not_blown_up() -> None:
    body = gzip.compress(json.dumps(ASKED).encode())
    async with http_front("127.0.0.1:1") as front:
        status, _ = await posted(front, body, **{"Content-Encoding": "gzip"})
    assert status == 400


@pytest.mark.parametrize("headers", [{"X": "x" * 100_000}, {f"X-{n}": "x" for n in range(1000)}])
async def test_too_many_headers_are_refused(headers: dict[str, str]) -> None:
    async with http_front("127.0.0.1:1") as front:
        async with front.session.get(f"{front.base_url}/health", headers=headers) as answer:
            assert answer.status == 400
        assert (await front.get("/health"))[0] == 200


async def test_a_body_that_does_not_come_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_app, "_BODY_S", 0.1)

    async def slow() -> Any:
        yield b'{"model": '
        await asyncio.sleep(30)

    async with http_front("127.0.0.1:1") as front, asyncio.timeout(60):
        request = front.session.post(f"{front.base_url}{COMPLETION}", data=slow())
        async with request as answer:
            assert answer.status == 408


async def test_a_stream_that_nobody_reads_frees_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_app, "_WRITE_S", 0.2)
    replica = TokenReplica(length=10_000_000)
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        host, port = front.base_url.removeprefix("http://").split(":")
        body = json.dumps({**ASKED, "stream": True, "max_tokens": 0x7FFFFFFF}).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.connect((host, int(port)))
            caller.sendall(head.encode() + body)
            async with asyncio.timeout(240):
                await replica.cancelled.wait()


async def test_more_choices_than_are_sampled_at_once_get_429() -> None:
    replica = TokenReplica(hangs_after=0)
    settings = OpenAIServerSettings(max_choices=3)
    async with (
        token_replicas(replica) as addresses,
        http_front(*addresses, settings=settings) as front,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        first = tasks.create_task(front.post(COMPLETION, **ASKED, n=2))
        await until(lambda: bool(replica.requests))
        status, answer = await front.post(COMPLETION, **ASKED, n=2)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        first.cancel()
        await replica.cancelled.wait()
        replica.hangs_after = None
        while (status := (await front.post(COMPLETION, **ASKED, n=3))[0]) == 429:
            await asyncio.sleep(0.01)  # the front has not left the request yet
        assert status == 200


async def test_a_page_in_a_browser_needs_a_key() -> None:
    origin = {"Origin": "https://example.org"}
    async with token_replicas(TokenReplica()) as addresses:
        async with http_front(*addresses) as front:
            body = json.dumps(ASKED).encode()
            assert (await posted(front, body))[0] == 200
            assert (await posted(front, body, **origin))[0] == 403
        keyed = OpenAIServerSettings(keys=GivenToken(KEY, "test"))
        async with http_front(*addresses, settings=keyed) as front:
            allowed = {**origin, "Authorization": f"Bearer {KEY}"}
            assert (await posted(front, body, **allowed))[0] == 200


async def test_a_defect_of_ours_has_the_dialects_shape_and_tells_no_caller_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("inside")

    monkeypatch.setattr(web_app, "parse_completion", broken)
    settings = OpenAIServerSettings(keys=GivenToken(KEY, "test"))
    with caplog.at_level(logging.DEBUG):
        async with http_front("127.0.0.1:1", settings=settings) as front:
            body = json.dumps(ASKED).encode()
            status, answer = await posted(front, body, Authorization=f"Bearer {KEY}")
    assert status == 500
    assert "inside" not in json.dumps(answer)
    assert "RuntimeError: inside" in caplog.text
    assert KEY not in caplog.text


async def test_with_stop_strings_every_streamed_choice_begins_with_its_role() -> None:
    async with token_replicas(TokenReplica()) as addresses, http_front(*addresses) as front:
        events = await front.events(
            CHAT,
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            n=4,
            stop="never",
            stream=True,
            stream_options={"include_usage": True},
        )
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"]["prompt_tokens"] == 3
    assert {event["system_fingerprint"] for event in events} == {"policy-version-3"}
    for index in range(4):
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])


async def test_the_end_of_the_server_does_not_wait_for_its_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_app, "_SHUTDOWN_S", 0.1)
    replica = TokenReplica(hangs_after=1)
    async with (
        token_replicas(replica) as addresses,
        AsyncClient(RunAddress(replicas=addresses)) as client,
        aiohttp.ClientSession() as session,
        asyncio.timeout(60),
    ):
        async with listening(OpenAIServer(client, OpenAIServerSettings()), "127.0.0.1", 0) as port:
            url = f"http://127.0.0.1:{port}{COMPLETION}"
            answer = await session.post(url, json={**ASKED, "stream": True})
            assert answer.status == 200
        await replica.cancelled.wait()
        answer.close()
