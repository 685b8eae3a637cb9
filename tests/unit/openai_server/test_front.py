"""The HTTP front over real sockets, on replicas whose tokens are scripted."""

from __future__ import annotations

import asyncio

import grpc
import pytest

pytest.importorskip("aiohttp")

from sluice.api.rollout.v1 import rollout_pb2
from sluice.openai_server.web_app import OpenAIServerSettings
from sluice.security.token_file import GivenToken
from tests.support.http_front import http_front
from tests.support.token_replica import TokenReplica, token_replicas, until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "hi"}]
WHOLE = "[0][1][2][3][4][5]"
SECOND = "[100][101][102][103][104][105]"
FOUR = ["".join(f"[{100 * index + place}]" for place in range(6)) for index in range(4)]


async def test_a_chat_is_answered_with_all_choices_logprobs_and_usage() -> None:
    async with token_replicas(TokenReplica()) as addresses, http_front(*addresses) as front:
        status, body = await front.post(
            CHAT, model="policy", messages=TURNS, n=2, logprobs=True, seed=4
        )
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "policy"
    assert body["system_fingerprint"] == "policy-version-3"
    assert [choice["message"]["content"] for choice in body["choices"]] == [WHOLE, SECOND]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    entries = body["choices"][1]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"[{100 + t}]" for t in range(6)]
    assert entries[1]["logprob"] == -101 / 8
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}


@pytest.mark.parametrize(("header", "sent"), [(f"00-{'a' * 32}-{'b' * 16}-01", True), ("?", False)])
async def test_the_callers_trace_is_passed_on_and_what_is_none_is_passed_over(
    header: str, sent: bool
) -> None:
    replica = TokenReplica()
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        body, of_trace = {"model": "policy", "messages": TURNS}, {"traceparent": header}
        async with front.session.post(
            f"{front.base_url}{CHAT}", json=body, headers=of_trace
        ) as answer:
            assert answer.status == 200
    assert replica.metadata[0].get("traceparent") == (header if sent else None)


async def test_a_streamed_chat_adds_up_to_the_whole_one() -> None:
    async with token_replicas(TokenReplica()) as addresses, http_front(*addresses) as front:
        events = await front.events(
            CHAT,
            model="policy",
            messages=TURNS,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"]["completion_tokens"] == 12
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for index, text in enumerate((WHOLE, SECOND)):
        chunks = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * 7 + ["stop"]


async def test_completions_of_many_prompts_are_in_order_and_tell_offsets_and_token_ids() -> None:
    async with token_replicas(TokenReplica()) as addresses, http_front(*addresses) as front:
        status, body = await front.post(
            COMPLETION, model="policy", prompt=["a", "b"], n=2, logprobs=1, return_token_ids=True
        )
    assert status == 200
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == FOUR
    logprobs = body["choices"][1]["logprobs"]
    assert logprobs["text_offset"] == [0, 5, 10, 15, 20, 25]
    assert logprobs["top_logprobs"][2] == {"[102]": -102 / 8}
    assert body["choices"][1]["token_ids"] == list(range(100, 106))
    assert body["usage"]["prompt_tokens"] == 6


async def test_one_call_draws_all_samples_of_a_prompt_and_the_engine_ends_them() -> None:
    replica = TokenReplica()
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        status, body = await front.post(
            COMPLETION, model="policy", prompt=["a", "b"], n=2, stop=["][2", "never"], seed=4
        )
    assert status == 200
    found = [(list(each.sample_indexes), each.sampling) for each in replica.requests]
    assert sorted(indexes for indexes, _ in found) == [[0, 1], [2, 3]]
    assert all(list(sampling.stop) == ["][2", "never"] for _, sampling in found)
    assert [choice["text"] for choice in body["choices"]] == FOUR  # as it sends them
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_goes_away_ends_its_samples(stream: bool) -> None:
    replica = TokenReplica(hangs_after=0)
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        body = {"model": "policy", "messages": TURNS, "stream": stream}
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            posting = tasks.create_task(front.post(CHAT, **body))
            await until(lambda: bool(replica.requests))
            posting.cancel()
            await replica.cancelled.wait()


async def test_a_refused_request_has_its_status_streamed_or_not() -> None:
    replica = TokenReplica(breaks_after=0, code=grpc.StatusCode.INVALID_ARGUMENT)
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        for stream in (False, True):
            status, body = await front.post(COMPLETION, model="policy", prompt="a", stream=stream)
            assert (status, body["error"]["message"]) == (400, "the replica is gone")


async def test_a_stream_that_fails_on_its_way_ends_with_the_error() -> None:
    replica = TokenReplica(breaks_after=2, code=grpc.StatusCode.INVALID_ARGUMENT)
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        events = await front.events(COMPLETION, model="policy", prompt="a", stream=True)
    assert "".join(event["choices"][0]["text"] for event in events[:-2]).startswith("[0][1]")
    assert events[-2]["error"]["type"] == "invalid_request_error"
    assert events[-1] == "[DONE]"


async def test_without_replicas_the_answer_is_503_in_the_dialects_shape() -> None:
    async with http_front("127.0.0.1:1") as front:
        for stream in (False, True):
            status, body = await front.post(COMPLETION, model="policy", prompt="a", stream=stream)
            assert status == 503
            assert body["error"]["code"] == "unavailable"


async def test_a_passed_deadline_is_504() -> None:
    settings = OpenAIServerSettings(deadline_s=0.2)
    async with (
        token_replicas(TokenReplica(hangs_after=1)) as addresses,
        http_front(*addresses, settings=settings) as front,
    ):
        status, body = await front.post(COMPLETION, model="policy", prompt="a")
    assert (status, body["error"]["type"]) == (504, "timeout_error")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"model": "gpt", "messages": TURNS}, 404, "model"),
        (CHAT, {"model": "policy", "messages": []}, 400, "messages"),
        (CHAT, {"model": "policy", "messages": 3}, 400, "messages"),
        (COMPLETION, {"model": "policy", "prompt": "a", "echo": True, "stream": True}, 400, "echo"),
        ("/v1/embeddings", {}, 404, None),
    ],
)
async def test_what_is_not_offered_is_refused_with_its_field(
    path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    async with http_front("127.0.0.1:1") as front:
        found, answer = await front.post(path, **body)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param


async def test_models_are_listed_and_only_health_needs_no_key() -> None:
    settings = OpenAIServerSettings(model_name="mine", keys=GivenToken("k" * 20, "test"))
    async with http_front("127.0.0.1:1", settings=settings) as front:
        assert await front.get("/health") == (200, {"status": "ok"})
        for headers in ({}, {"Authorization": "Bearer " + "x" * 20}, {"Authorization": "k" * 20}):
            status, body = await front.get("/v1/models", headers=headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        right = {"Authorization": f"Bearer {'k' * 20}"}
        status, body = await front.get("/v1/models", headers=right)
        assert (status, body["data"][0]["id"]) == (200, "mine")
        assert (await front.get("/v1/models/mine", headers=right))[0] == 200
        assert (await front.get("/v1/models/other", headers=right))[0] == 404


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ({}, rollout_pb2.STREAM_MODE_SAMPLES),
        ({"return_token_ids": True}, rollout_pb2.STREAM_MODE_SAMPLES),
        ({"stream": True}, rollout_pb2.STREAM_MODE_TOKENS),
        ({"logprobs": 1}, rollout_pb2.STREAM_MODE_TOKENS),
    ],
)
async def test_tokens_are_asked_for_one_by_one_only_where_the_answer_tells_their_texts(
    asked: dict[str, object], mode: int
) -> None:
    replica = TokenReplica()
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        if "stream" in asked:
            await front.events(COMPLETION, model="policy", prompt="a", **asked)
        else:
            _, body = await front.post(COMPLETION, model="policy", prompt="a", **asked)
            assert body["choices"][0]["text"] == WHOLE
            assert body["usage"]["completion_tokens"] == 6
    assert [request.stream_mode for request in replica.requests] == [mode]
    if "return_token_ids" in asked:
        assert body["choices"][0]["token_ids"] == list(range(6))


async def test_more_choices_than_a_replica_accepts_in_one_call_take_several() -> None:
    replica = TokenReplica(length=1)
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        asked = {"n": 600, "token_budget": 1205}
        status, body = await front.post(COMPLETION, model="policy", prompt="a", **asked)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [f"[{100 * i}]" for i in range(600)]
    indexes = sorted(tuple(request.sample_indexes) for request in replica.requests)
    assert [len(each) for each in indexes] == [256, 256, 88]
    budgets = sorted(request.token_budget for request in replica.requests)
    assert budgets == [2 * 88, 2 * 256, 2 * 256]
    assert sorted(sum(indexes, ())) == list(range(600))


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_more_tokens_than_the_runs_context_are_refused_with_the_most(field: str) -> None:
    settings = OpenAIServerSettings(max_tokens=99)
    async with (
        token_replicas(TokenReplica()) as addresses,
        http_front(*addresses, settings=settings) as front,
    ):
        asked = {"model": "policy", "messages": TURNS}
        refused, body = await front.post(CHAT, **asked, **{field: 100})
        accepted, _ = await front.post(CHAT, **asked, **{field: 99})
    assert (refused, accepted) == (400, 200)
    assert body["error"]["param"] == field
    assert "send at most 99" in body["error"]["message"]
