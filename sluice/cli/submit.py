"""`sluice submit`: hand prompts to a run to be trained on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from sluice.cli.running_run import ask_run
from sluice.cli.terminal_text import printable
from sluice.client.policy_client import NewPrompt, PolicyClient, PromptEvent
from sluice.errors import DataError
from sluice.types import ChatMessage


class _Turn(msgspec.Struct):
    role: str
    content: str


class _Row(msgspec.Struct):
    prompt_id: str
    prompt: list[_Turn]
    data_source: str
    ground_truth: str


def submit(
    file: Annotated[Path, typer.Argument(help="JSONL, one prompt a line.")],
    *,
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/quickstart"),
    watch: Annotated[bool, typer.Option("--watch", help="Wait for the outcomes as well.")] = False,
) -> None:
    """Submit prompts for training; accepted ones are trained on or filtered, never lost.

    \b
    A line of the file, wrapped here:
      {"prompt_id": "a1", "data_source": "math_dapo", "ground_truth": "9",
       "prompt": [{"role": "user", "content": "What is 2 + 3 + 4?"}]}

    The exit code is 1 if a prompt was refused.

    \b
    Example:
      sluice submit prompts.jsonl --watch
    """
    prompts = read_prompts(file)
    refused = asyncio.run(_submit(run, prompts, watch=watch))
    if refused:
        raise typer.Exit(1)


def read_prompts(file: Path) -> list[NewPrompt]:
    """Reads prompts to submit.

    Raises:
        DataError: naming the file, the line and what is wrong with it.
    """
    if not file.is_file():
        raise DataError(f"{file}: no such file; give a JSONL file with one prompt a line")
    lines = file.read_bytes().split(b"\n")
    prompts = [_parse(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DataError(f"{file}: holds no prompt; write one JSON object a line")
    return prompts


def _parse(file: Path, number: int, line: bytes) -> NewPrompt:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file}, line {number}: {error}; a line needs prompt_id, prompt "
            "([{role, content}]), data_source and ground_truth, each a text"
        ) from error
    turns = tuple(ChatMessage(turn.role, turn.content) for turn in row.prompt)
    return NewPrompt(row.prompt_id, turns, row.data_source, row.ground_truth)


async def _submit(run: Path, prompts: list[NewPrompt], *, watch: bool) -> int:
    """Prints what becomes of the prompts; how many were refused."""
    location, _ = await ask_run(run)
    receipts = refused = 0
    client = PolicyClient(location.reward, credentials=location.credentials)
    async with client, aclosing(client.submit(prompts)) as events:
        async for event in events:
            typer.echo(printable(_line(event)))
            if event.event in {"accepted", "refused"}:
                receipts += 1
                refused += event.event == "refused"
                if not watch and receipts == len(prompts):
                    break
    return refused


def _line(event: PromptEvent) -> str:
    step = "" if event.step is None else f" in step {event.step}"
    rewards = f" rewards {list(event.rewards)}" if event.rewards else ""
    detail = f": {event.detail}" if event.detail else ""
    return f"{event.prompt_id} {event.event}{step}{rewards}{detail}"
