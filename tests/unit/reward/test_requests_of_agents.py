"""Requests of agents: an error names the field; each request has its own tools; history that is
rewritten is said."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sluice.types import RolloutGroup
from tests.support.leased import Leased, leased
from tests.support.scripted_environment import group_request, jar_policy

FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASKED = [{"role": "user", "content": "Add jars."}]


class Session:
    """One leased sample."""

    def __init__(self, run: Leased, lease: str) -> None:
        self._run, self._lease = run, lease
        self.group: RolloutGroup | None = None

    async def post(self, path: str, body: str) -> tuple[int, Any]:
        url = f"{self._run.base_url}/s/{self._lease}{path}"
        async with aiohttp.ClientSession() as session, session.post(url, data=body) as answer:
            return answer.status, await answer.json()

    async def chat(self, messages: list[Any], **fields: Any) -> tuple[int, Any]:
        body = {"model": "any", "messages": messages} | fields
        return await self.post("/v1/chat/completions", json.dumps(body))

    async def said(self, messages: list[Any], **fields: Any) -> list[Any]:
        """Return the conversation with the answer, as the client got it."""
        status, answer = await self.chat(messages, **fields)
        assert status == 200, answer
        return [*messages, answer["choices"][0]["message"]]


@asynccontextmanager
async def session(folder: Path, policy: Any, **given: Any) -> AsyncIterator[Session]:
    """A sample; after the block, which ends it, its group has been generated."""
    async with leased(folder, policy, **given) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(run.generator.generate(group_request(1)))
        async with asyncio.timeout(30):
            (lease,) = await run.client.leases().take(1, 30.0)
        one = Session(run, lease.lease_id)
        yield one
        assert (await one.post("/end", '{"reward": 1}'))[0] == 200
        one.group = await group


async def test_a_request_that_cannot_be_read_names_the_field_and_costs_the_sample_nothing(
    tmp_path: Path,
) -> None:
    def called(arguments: str) -> list[Any]:
        call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "a", "content": "7"}
        return [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result]

    def tool(**changes: Any) -> list[Any]:
        return [{"type": "function", "function": FUNCTION | changes}]

    async with session(tmp_path, jar_policy("C")) as one:
        for messages, fields, words in (
            (called("{jar: C}"), {}, "messages[1].tool_calls[0].arguments"),
            (called("[1]"), {}, "messages[1].tool_calls[0].arguments"),
            (ASKED, {"tools": [{"type": "web_search"}]}, "tools: [0] is of type 'web_search'"),
            (ASKED, {"tools": tool(name="look into")}, "tools[0].name: 'look into'"),
            (ASKED, {"tools": tool(parameters="none")}, "tools[0].parameters"),
            (ASKED, {"tools": [*TOOLS, *TOOLS]}, "tools[1].name: look is given twice"),
            (ASKED, {"n": 2}, "n: 2"),
            (ASKED, {"response_format": {"type": "json_object"}}, "response_format"),
        ):
            status, body = await one.chat(messages, **fields)
            assert status == 400
            assert words in body["error"]["message"]
        await one.said(ASKED, tools=TOOLS)
    assert one.group is not None
    assert len(one.group.rollouts[0].turns) == 1


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "1e999", '"high"', "true"])
async def test_a_reward_that_is_no_finite_number_is_refused_and_another_counts(
    tmp_path: Path, reward: str
) -> None:
    async with session(tmp_path, jar_policy("C")) as one:
        await one.said(ASKED)
        status, body = await one.post("/end", f'{{"reward": {reward}}}')
        assert status == 400
        assert "reward" in body["error"]["message"]


async def test_a_request_without_tools_drops_those_of_the_request_before(
    tmp_path: Path,
) -> None:
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        async with session(tmp_path, jar_policy("C", "D")) as one:
            messages = await one.said(ASKED, tools=TOOLS)
            call = messages[-1]["tool_calls"][0]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
            last = await one.said([*messages, result], **fields)
            # What looks like a call is text now.
            assert "tool_calls" not in last[-1]
            assert "look" in last[-1]["content"]
        assert one.group is not None
        (rollout,) = one.group.rollouts
        assert (len(rollout.turns), rollout.num_roots) == (2, 2)


async def test_calls_and_results_have_the_same_ids_where_history_is_rewritten(
    tmp_path: Path,
) -> None:
    called = '<|channel>thought\nhm<channel|><|tool_call>call:look{jar:<|"|>C<|"|>}<tool_call|>'
    async with session(tmp_path, lambda _: called, family="gemma4") as one:
        messages = await one.said(ASKED, tools=TOOLS)
        call = messages[-1]["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
        last = await one.said([*messages, result], tools=TOOLS)
    assert last[-1]["tool_calls"][0]["id"] != call["id"]
    assert one.group is not None
    assert one.group.rollouts[0].num_roots == 2


@pytest.mark.parametrize(
    ("family", "second", "words"),
    [
        ("qwen3", None, "the chat template rewrites history"),
        ("qwen2.5", "Summary: it said more.", "a conversation continues none of"),
    ],
)
async def test_history_that_is_rewritten_begins_a_root_and_is_said_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    second: str | None,
    words: str,
) -> None:
    caplog.set_level(logging.WARNING)

    def policy(_prompt: str) -> str:
        return "<think>\nhm\n</think>\n\nMore."

    async with session(tmp_path, policy, family=family) as one:
        messages = await one.said(ASKED)
        for _ in range(2):
            if second is not None:
                messages[-1]["content"] = second
            messages = await one.said([*messages, {"role": "user", "content": "And?"}])
    assert one.group is not None
    (rollout,) = one.group.rollouts
    assert rollout.num_roots == len(rollout.turns) == 3
    said = [each.message for each in caplog.records if "turns begin new roots" in each.message]
    assert len(said) == 1
    assert words in said[0]
