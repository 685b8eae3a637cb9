"""`sluice submit`: hand prompts to a run to be trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.running_run import ask_run
from sluice.cli.submission_view import SubmissionView
from sluice.cli.submitted_prompts import read_prompts
from sluice.cli.terminal_text import printable
from sluice.client.async_client import AsyncClient
from sluice.client.policy_client import NewPrompt, PromptEvent


def submit(
    file: Annotated[Path, typer.Argument(help="JSON lines or parquet, one prompt a row.")],
    *,
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/quickstart"),
    watch: Annotated[bool, typer.Option("--watch", help="Wait for the outcomes as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Submit prompts for training; accepted ones are trained on or filtered, never lost.

    \b
    A line of the file, wrapped here; prompt_id, extra_info and images may be left out:
      {"prompt_id": "a1", "data_source": "math_dapo", "ground_truth": "9",
       "prompt": [{"role": "user", "content": "<image>What is 2 + 3 + 4?"}],
       "images": ["sum.png"]}

    Images are paths beside the file, or data: URIs; each stands for an <image> in the texts.
    Parquet files have the columns of a training set. The command may be interrupted and repeated:
    the same prompts are not accepted twice, and their outcomes are told again. Prompts wait where
    there is no room for them: with --watch as long as it takes, else until nothing got on for a
    minute. The exit code is 1 if a prompt was refused.

    \b
    Example:
      sluice submit prompts.jsonl --watch
    """
    prompts = read_prompts(file)
    if asyncio.run(_submit(run, prompts, watch=watch, as_json=as_json)):
        raise typer.Exit(1)


async def _submit(run: Path, prompts: Sequence[NewPrompt], *, watch: bool, as_json: bool) -> int:
    """Prints what becomes of the prompts; how many were refused."""
    await ask_run(run)  # says how a run ended that does not go on
    with SubmissionView(len(prompts), watch=watch) as view:
        async with (
            AsyncClient.connect(run) as client,
            aclosing(client.submit(prompts, until_outcome=watch)) as events,
        ):
            async for event in events:
                view.show(event, _json_line(event) if as_json else printable(_line(event)))
    return view.num_refused


def _line(event: PromptEvent) -> str:
    step = "" if event.step is None else f" in step {event.step}"
    rewards = f" rewards {list(event.rewards)}" if event.rewards else ""
    detail = f": {event.detail}" if event.detail else ""
    return f"{event.prompt_id} {event.event}{step}{rewards}{detail}"


def _json_line(event: PromptEvent) -> str:
    return json.dumps(
        {
            "prompt_id": event.prompt_id,
            "event": event.event,
            "step": event.step,
            "rewards": list(event.rewards),
            "detail": event.detail,
        }
    )
