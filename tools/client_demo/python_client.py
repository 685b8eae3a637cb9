"""A client of the demo in Python, through the SDK: `python -m tools.client_demo.python_client`.

Its first line of input is its task (a JSON object: run, name, concurrency, max_tokens, deadline_s,
prompts, vanish_at); it answers ``{"ready": true}`` and begins with the second line. Then it prints
a line for each prompt's first token (``began``), end (``done``, with seconds, first_s, tokens and
retries) or failure (``failed``). At the first token of a prompt numbered `vanish_at` or higher it
kills itself, if that is not null. The client in Node follows the same rules.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from contextlib import aclosing
from typing import Any

from sluice.client import (
    AsyncClient,
    ChatMessage,
    GenerateOptions,
    GenerationStarted,
    RetryPolicy,
    SampleDelta,
    SampleFinished,
    Sampling,
)
from sluice.errors import SluiceError

Turns = list[dict[str, str]]


def _notify(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def _one(client: AsyncClient, number: int, turns: Turns, task: dict[str, Any]) -> None:
    options = GenerateOptions(
        sampling=Sampling(max_tokens=task["max_tokens"], seed=number),
        deadline_s=task["deadline_s"],
    )
    messages = [ChatMessage(turn["role"], turn["content"]) for turn in turns]
    began_s, first_s, retries = time.monotonic(), None, 0
    async with aclosing(client.stream(messages, options)) as events:
        async for event in events:
            if isinstance(event, GenerationStarted):
                retries += bool(event.moved_because)
            elif isinstance(event, SampleDelta) and first_s is None:
                first_s = time.monotonic() - began_s
                _notify(began=number)
                if task["vanish_at"] is not None and number >= task["vanish_at"]:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif isinstance(event, SampleFinished):
                seconds = time.monotonic() - began_s
                _notify(
                    done=number,
                    seconds=seconds,
                    first_s=seconds if first_s is None else first_s,
                    tokens=event.rollout.num_tokens,
                    retries=retries,
                )


async def _work(
    client: AsyncClient, waiting: deque[tuple[int, Turns]], task: dict[str, Any]
) -> None:
    while waiting:
        number, turns = waiting.popleft()
        try:
            await _one(client, number, turns, task)
        except SluiceError as error:
            _notify(failed=number, error=f"{type(error).__name__}: {error}")


async def main() -> None:
    """Ask all prompts, `concurrency` of them at a time."""
    task: dict[str, Any] = json.loads(await asyncio.to_thread(sys.stdin.readline))
    policy = RetryPolicy(patience_s=task["deadline_s"])
    async with AsyncClient.connect(task["run"], name=task["name"], policy=policy) as client:
        await client.replicas()
        _notify(ready=True)
        await asyncio.to_thread(sys.stdin.readline)
        waiting = deque((number, turns) for number, turns in task["prompts"])
        async with asyncio.TaskGroup() as tasks:
            for _ in range(task["concurrency"]):
                tasks.create_task(_work(client, waiting, task))


if __name__ == "__main__":
    asyncio.run(main())
