"""`sluice submit`: hand prompts to a run to be trained on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.run_location import RunLocation, locate_run
from sluice.client.policy_client import NewPrompt, PolicyClient, PromptEvent
from sluice.errors import DataError
from sluice.types import ChatMessage


def submit(
    file: Annotated[Path, typer.Argument(help="JSONL, one prompt a line.")],
    *,
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/quickstart"),
    watch: Annotated[bool, typer.Option(help="Wait for the outcomes as well.")] = False,
) -> None:
    """Submit prompts for training; accepted ones are trained on or filtered, never lost.

    A line holds prompt_id, prompt (a list of {role, content}), data_source and ground_truth:

      {"prompt_id": "a1", "prompt": [{"role": "user", "content": "What is 2 + 3 + 4?"}],
       "data_source": "math_dapo", "ground_truth": "9"}

    Example:

      sluice submit prompts.jsonl --watch
    """
    prompts = read_prompts(file)
    refused = asyncio.run(_submit(locate_run(run), prompts, watch=watch))
    if refused:
        raise typer.Exit(1)


def read_prompts(file: Path) -> list[NewPrompt]:
    """Reads prompts to submit.

    Raises:
        DataError: naming the file, the line and what is wrong with it.
    """
    if not file.is_file():
        raise DataError(f"{file}: no such file; give a JSONL file with one prompt a line")
    lines = file.read_text(encoding="utf-8").splitlines()
    prompts = [_parse(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DataError(f"{file}: holds no prompt; write one JSON object a line")
    return prompts


def _parse(file: Path, number: int, line: str) -> NewPrompt:
    try:
        row = json.loads(line)
        return NewPrompt(
            prompt_id=str(row["prompt_id"]),
            messages=tuple(ChatMessage(m["role"], m["content"]) for m in row["prompt"]),
            data_source=str(row["data_source"]),
            ground_truth=str(row["ground_truth"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(
            f"{file}, line {number}: {type(error).__name__} {error}; a line needs prompt_id, "
            "prompt ([{role, content}]), data_source and ground_truth"
        ) from error


async def _submit(location: RunLocation, prompts: list[NewPrompt], *, watch: bool) -> int:
    receipts = refused = 0
    async with PolicyClient(location.reward) as client:
        async for event in client.submit(prompts):
            typer.echo(_line(event))
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
