"""Environments that start an agent's program, and answer its requests from the policy.

A program gets the task as JSON on standard input, and finds the policy at OPENAI_BASE_URL.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from sluice.environment.loops import EpisodeOver, LoopTask, Policy
from sluice.openai_front.errors import RefusedError
from sluice.openai_front.requests import Bounds, ChatRequest, decode, parse_chat

PROGRAMS = Path(__file__).with_name("programs")


async def with_openai(task: LoopTask, policy: Policy) -> None:
    """The client alone."""
    await _played("with_openai.py", task, policy)


async def with_openai_agents(task: LoopTask, policy: Policy) -> None:
    """The Agents SDK."""
    await _played("with_openai_agents.py", task, policy)


async def with_smolagents(task: LoopTask, policy: Policy) -> None:
    """smolagents."""
    await _played("with_smolagents.py", task, policy)


class _Front:
    """Answers the requests of one program."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.is_over = False
        self._turns = 0

    async def chat(self, request: web.Request) -> web.Response:
        """Answer a chat from the policy."""
        body = await request.read()
        try:
            parse_chat(decode(body, ChatRequest), Bounds())
        except RefusedError as error:
            return _refused(str(error))
        asked = json.loads(body)
        messages = [_plain(message) for message in asked["messages"]]
        try:
            answer = await self._policy.chat(messages, asked.get("tools"))
        except EpisodeOver:
            self.is_over = True
            return _refused("the episode is over")
        self._turns += 1
        # The Agents SDK takes a call for done whose id it has seen, and ids of the policy begin
        # again in each turn.
        message = answer.message
        for call in answer.tool_calls:
            call["id"] += f".{self._turns}"
        finish = "tool_calls" if answer.tool_calls else "stop"
        return web.json_response(
            {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "object": "chat.completion",
                "created": 0,
                "model": asked["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
        )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    calls = [{**call, "id": _own_id(call["id"])} for call in message.get("tool_calls") or ()]
    turn = {**message, "content": content, "tool_calls": calls}
    return {**turn, "tool_call_id": _own_id(message.get("tool_call_id") or "")}


def _own_id(call_id: str) -> str:
    """The policy's id of a call, without its turn."""
    return call_id.partition(".")[0]


def _refused(reason: str) -> web.Response:
    return web.json_response({"error": {"message": reason, "type": "invalid"}}, status=400)


async def _played(program: str, task: LoopTask, policy: Policy) -> None:
    """Serve a program until it ends. Its row's scorer grades.

    Raises:
        RuntimeError: it has failed although the episode was not over.
    """
    front, app = _Front(policy), web.Application()
    app.router.add_post("/v1/chat/completions", front.chat)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        process = await asyncio.create_subprocess_exec(
            os.environ["SLUICE_AGENTS_PYTHON"],
            str(PROGRAMS / program),
            env={"OPENAI_BASE_URL": address, "OPENAI_API_KEY": "none", "HOME": os.environ["HOME"]},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            row = {"messages": task.prompt, "extra_info": dict(task.extra_info)}
            said, _ = await process.communicate(json.dumps(row).encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode and not front.is_over:
            raise RuntimeError(f"{program}: {said.decode()[-1000:]}")
    finally:
        await runner.cleanup()
