"""Tools, their calls and continuations over a real server, by the SDK and by plain protos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.client import (
    Answer,
    AsyncClient,
    ChatMessage,
    Continuation,
    GenerateOptions,
    Generation,
    RetryPolicy,
    RunAddress,
    Sampling,
    Tool,
    ToolCall,
)
from sluice.client.generation import GenerationProgress
from sluice.codec.rollout import check_generate
from sluice.errors import HistoryRewrittenError, InvalidRequestError
from sluice.types import FinishReason
from tests.support.scripted_policy import scripted_policy
from tests.support.token_replica import TokenReplica, token_replicas

LOOK = Tool("look", "Look into a jar.", '{"type": "object", "properties": {"jar": {}}}')
QUESTION = ChatMessage("user", "What is in jar C?")
CALL = '<tool_call>\n{"name": "look", "arguments": {"jar":  "C"}}\n</tool_call>'
ONCE = RetryPolicy(patience_s=0.0)
NO_TOKENS = np.array([], np.uint32)


def looks_first(prompt: str) -> str:
    """A policy that looks into the jar, and then says what is in it."""
    _, seen, after = prompt.rpartition("<tool_response>\n")
    return (
        f"It holds {after.partition(chr(10))[0]}." if seen else f"<think>\nhm\n</think>\n\n{CALL}"
    )


async def asked(address: str, prompt: Any, **options: Any) -> Generation:
    async with AsyncClient(RunAddress(replicas=(address,)), policy=ONCE) as client:
        return await client.generate(prompt, GenerateOptions(**options))


async def test_a_dialogue_with_a_tool_is_one_sequence_of_tokens(tmp_path: Path) -> None:
    async with scripted_policy("qwen3", tmp_path, looks_first) as (address, engine):
        first = await asked(address, [QUESTION], tools=(LOOK,))
        (called,) = first.rollouts
        assert called.answer == Answer("", "hm", (ToolCall("look", '{"jar":  "C"}', "call_0"),))
        so_far = [*first.prompt_token_ids, *called.token_ids]
        result = ChatMessage("tool", "6", tool_call_id="call_0")
        second = await asked(address, Continuation(so_far, (result,)), tools=(LOOK,))
    assert second.rollouts[0].answer == Answer("It holds 6.")
    assert engine.prompts[1][: len(so_far)] == so_far
    assert second.prompt_token_ids.tolist() == engine.prompts[1]


async def test_answers_are_read_only_where_a_request_asks(tmp_path: Path) -> None:
    async with scripted_policy("qwen3", tmp_path, looks_first) as (address, _):
        plain = await asked(address, [QUESTION])
        thoughts = await asked(address, [QUESTION], tool_format="plain")
        cut = await asked(address, [QUESTION], tools=(LOOK,), sampling=Sampling(max_tokens=30))
    assert plain.rollouts[0].answer is None
    assert thoughts.rollouts[0].answer == Answer(CALL, "hm")
    assert cut.rollouts[0].finish_reason is FinishReason.LENGTH
    assert "</tool_call> is missing" in cut.rollouts[0].answer.tool_error  # type: ignore[union-attr]


async def test_a_history_that_the_template_rewrites_fails_by_its_name(tmp_path: Path) -> None:
    async with scripted_policy("qwen3", tmp_path, looks_first) as (address, _):
        first = await asked(address, [QUESTION], tools=(LOOK,))
        so_far = [*first.prompt_token_ids, *first.rollouts[0].token_ids]
        with pytest.raises(HistoryRewrittenError, match=r"the template rewrites history.*new root"):
            await asked(address, Continuation(so_far, (ChatMessage("user", "And D?"),)))
        for prompt, reported in (
            (
                Continuation(NO_TOKENS, (QUESTION,)),
                r"continuation\.token_ids_u32: send 1 or more ids",
            ),
            (Continuation([1 << 20], (QUESTION,)), "ids below 1024"),
            (Continuation([1] * 5000, (QUESTION,)), "5000 tokens; the model's context of 4096"),
            (
                Continuation(so_far, (ChatMessage("assistant", "6"),)),
                r"messages\[0\]\.role: 'assistant'; only turns of user and tool continue",
            ),
        ):
            with pytest.raises(InvalidRequestError, match=reported):
                await asked(address, prompt)


async def test_a_call_that_moves_to_another_replica_keeps_its_tools() -> None:
    moving, other = TokenReplica(aborts_after=2), TokenReplica(slots_busy=3)
    async with (
        token_replicas(moving, other) as addresses,
        AsyncClient(RunAddress(replicas=addresses), policy=RetryPolicy(first_s=0.01)) as client,
    ):
        await client.generate([QUESTION], GenerateOptions(tools=(LOOK,)))
    again = other.requests[0].prompt.continuation
    assert [tool.name for tool in again.tools] == ["look"]
    assert not again.messages
    assert again.token_ids_u32


@pytest.mark.parametrize("prompt", ["text", (1, 2)])
def test_tools_for_what_is_no_conversation_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tools: .*send turns, or leave it out"):
        GenerationProgress(prompt, GenerateOptions(tools=(LOOK,)), every_token=False)


def request(*, tools: Any = (), turn: Any = None, tool_format: str = "") -> Any:
    turns = [common.ChatMessage(**({"role": "user", "content": "?"} | (turn or {})))]
    prompt = common.PromptInput(chat=common.ChatPrompt(messages=turns, tools=tools))
    return rollout.GenerateRequest(prompt=prompt, sample_indexes=[0], tool_format=tool_format)


def tool(name: str = "f", **fields: str) -> common.Tool:
    return common.Tool(name=name, **fields)


def turn_with_call(**fields: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [common.ToolCall(**fields)]}


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"tools": [tool("")]}, r"prompt\.chat\.tools\[0\]\.name: ''; send 1 to 64"),
        ({"tools": [tool("a b")]}, r"tools\[0\]\.name: 'a b'; send 1 to 64"),
        ({"tools": [tool(), tool()]}, r"tools\[1\]\.name: f is given twice; rename one"),
        ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools: 129 given; send at most 128"),
        ({"tools": [tool(description="d" * 20_000)]}, r"description: .* send at most 16384"),
        ({"tools": [tool(parameters_json="{")]}, r"parameters_json: '\{' is not JSON"),
        ({"tools": [tool(parameters_json="[1]")]}, r"parameters_json: .* is no object"),
        (
            {"tools": [tool(parameters_json='{"a": "' + "b" * 70_000 + '"}')]},
            r"parameters_json: .* send at most 65536",
        ),
        (
            {"tools": [tool(parameters_json='{"a":' * 33 + "1" + "}" * 33)]},
            "more than 32 levels deep; flatten it",
        ),
        (
            {"tools": [tool(parameters_json='{"a":' * 9000 + "1" + "}" * 9000)]},
            r"parameters_json: .* is not JSON \(maximum recursion depth",
        ),
        ({"turn": {"role": "user", "tool_calls": [common.ToolCall(name="f")]}}, "only the assist"),
        ({"turn": {"tool_call_id": "c"}}, r"messages\[0\]\.tool_call_id: .* only tools answer"),
        (
            {"turn": turn_with_call(name="f", arguments_json="x")},
            r"arguments_json: 'x' is not JSON",
        ),
        ({"turn": turn_with_call(arguments_json="{}")}, r"tool_calls\[0\]\.name: empty; name the"),
        (
            {"turn": {"role": "assistant", "tool_calls": [common.ToolCall()] * 129}},
            "129 given; send at most 128",
        ),
        ({"tool_format": "xml"}, "tool_format: 'xml' is unknown; send hermes, qwen3_coder"),
    ],
)
def test_a_hostile_request_is_refused_by_field_value_and_remedy(
    fields: dict[str, Any], reported: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reported):
        check_generate(request(**fields), 8)


def test_the_deepest_schema_is_taken() -> None:
    check_generate(request(tools=[tool(parameters_json='{"a":' * 31 + "{}" + "}" * 31)]), 8)
