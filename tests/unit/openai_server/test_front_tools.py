"""A tool dialogue through the front, by OpenAI's own client and by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.support.http_front import HttpFront, http_front
from tests.support.scripted_policy import scripted_policy

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"jar": {"type": "string"}}, "required": ["jar"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True},
    }
]
QUESTION = {"role": "user", "content": "What is in jar C?"}
ARGUMENTS = '{"jar":  "C"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'


def looks_first(prompt: str) -> str:
    """A policy that looks if it has a tool and has not looked yet."""
    _, seen, after = prompt.rpartition("<tool_response>\n")
    if seen:
        return f"It holds {after.partition(chr(10))[0]}."
    if "<tools>" not in prompt:
        return "<think>\nno tool\n</think>\n\nI guess."
    return f"<think>\nhm\n</think>\n\nI look.\n{CALL}"


@asynccontextmanager
async def front_on_policy(folder: Path) -> AsyncIterator[HttpFront]:
    async with (
        scripted_policy("qwen3", folder, looks_first) as (address, _),
        http_front(address) as front,
    ):
        yield front


async def test_openais_own_client_has_a_dialogue_with_a_tool(tmp_path: Path) -> None:
    openai: Any = pytest.importorskip("openai")
    async with (
        front_on_policy(tmp_path) as front,
        openai.AsyncOpenAI(
            base_url=f"{front.base_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        messages: list[Any] = [QUESTION]
        asked = {"model": "policy", "tools": TOOLS, "tool_choice": "auto"}
        first = (await client.chat.completions.create(messages=messages, **asked)).choices[0]
        assert first.finish_reason == "tool_calls"
        assert (first.message.content, first.message.reasoning_content) == ("I look.", "hm")
        (call,) = first.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", ARGUMENTS)
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "6"}]
        second = (await client.chat.completions.create(messages=messages, **asked)).choices[0]
        assert (second.finish_reason, second.message.content) == ("stop", "It holds 6.")
        assert second.message.tool_calls is None

        async with client.chat.completions.stream(messages=[QUESTION], **asked) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.content == "I look."
        (again,) = streamed.message.tool_calls
        assert again.function.arguments == ARGUMENTS
        assert again.id != call.id


async def test_calls_have_the_ids_that_the_policy_wrote(tmp_path: Path) -> None:
    written = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"jar": "C"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    messages: list[Any] = [QUESTION]
    async with (
        scripted_policy("kimi", tmp_path, lambda _: written) as (address, _),
        http_front(address) as front,
    ):
        for number in range(2):
            _, body = await front.post(CHAT, model="policy", messages=messages, tools=TOOLS)
            message = body["choices"][0]["message"]
            (call,) = message["tool_calls"]
            assert call["id"] == f"functions.look:{number}"
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "6"}]


async def test_a_streamed_answer_with_tools_comes_whole_at_its_end(tmp_path: Path) -> None:
    async with front_on_policy(tmp_path) as front:
        events = await front.events(
            CHAT, model="policy", messages=[QUESTION], tools=TOOLS, stream=True, logprobs=True
        )
    role, said, end = (event["choices"][0] for event in events[:-1])
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert said["delta"]["content"] == "I look."
    assert said["delta"]["reasoning_content"] == "hm"
    (call,) = said["delta"]["tool_calls"]
    assert (call["index"], call["type"]) == (0, "function")
    assert call["function"] == {"name": "look", "arguments": ARGUMENTS}
    assert said["logprobs"]["content"]
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": None}]
)
async def test_without_tools_an_answer_is_all_text(
    fields: dict[str, object], tmp_path: Path
) -> None:
    async with front_on_policy(tmp_path) as front:
        _, body = await front.post(CHAT, model="policy", messages=[QUESTION], **fields)
    message = body["choices"][0]["message"]
    assert message["content"] == "<think>\nno tool\n</think>\n\nI guess."
    assert "reasoning_content" not in message


async def test_thoughts_are_apart_where_a_request_asks(tmp_path: Path) -> None:
    asked = {"model": "policy", "messages": [QUESTION], "separate_reasoning": True}
    async with front_on_policy(tmp_path) as front:
        _, body = await front.post(CHAT, **asked)
        events = await front.events(CHAT, **asked, stream=True)
    expected = {"content": "I guess.", "reasoning_content": "no tool"}
    assert body["choices"][0]["message"] == {"role": "assistant", "refusal": None, **expected}
    assert events[1]["choices"][0]["delta"] == expected


async def test_a_call_that_cannot_be_read_is_text(tmp_path: Path) -> None:
    async with (
        scripted_policy("qwen3", tmp_path, lambda _: "<tool_call>look") as (address, _),
        http_front(address) as front,
    ):
        _, body = await front.post(CHAT, model="policy", messages=[QUESTION], tools=TOOLS)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "<tool_call>look"
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("fields", "param", "reported"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools", "is of type 'retrieval'; send functions"),
        ({"tools": [{"type": "function"}]}, "tools", "send functions"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools",
            "tools[0].name: 'a b'; send 1 to 64",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools",
            "tools[0].parameters_json: '[1]' is no object",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
            "tool_choice",
            "never forced",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", "send true"),
        (
            {
                "messages": [
                    QUESTION,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "x"}}],
                    },
                ]
            },
            None,
            "prompt.chat.messages[1].tool_calls[0].arguments_json: 'x' is not JSON",
        ),
    ],
)
async def test_what_tools_cannot_be_is_refused_with_its_field(
    fields: dict[str, object], param: str | None, reported: str, tmp_path: Path
) -> None:
    async with front_on_policy(tmp_path) as front:
        status, body = await front.post(
            CHAT, **{"model": "policy", "messages": [QUESTION]} | fields
        )
    assert (status, body["error"]["param"]) == (400, param)
    assert reported in body["error"]["message"], json.dumps(body)
