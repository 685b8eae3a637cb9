"""`sluice generate`: sample from the policy in training."""

from __future__ import annotations

import asyncio
import secrets
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.running_run import ask_run
from sluice.cli.terminal_text import printable
from sluice.client.policy_client import PolicyClient
from sluice.errors import NotReadyError
from sluice.types import ChatMessage, Rollout, SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The user's turn.")],
    *,
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/quickstart"),
    n: Annotated[int, typer.Option("-n", min=1, help="Responses.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass in (0, 1].")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=0, help="Longest response; 0: the context.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Fixes the randomness.")] = None,
) -> None:
    """Sample responses from a replica of a run that is going on.

    \b
    Example:
      sluice generate "What is 2 + 6 + 9? End with 'Answer: N'." -n 4
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=-1,
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if seed is None else seed,
    )
    for rollout in asyncio.run(_generate(run, prompt, sampling, n)):
        spans = ", ".join(f"{s.version}" for s in rollout.version_spans)
        typer.echo(f"[{rollout.sample_index}] version {spans} ({rollout.finish_reason})")
        # A pipe gets the text as it is; a terminal would obey escape sequences in it.
        typer.echo(printable(rollout.text) if sys.stdout.isatty() else rollout.text)


async def _generate(run: Path, prompt: str, sampling: SamplingParams, n: int) -> list[Rollout]:
    location, snapshot = await ask_run(run)
    serving = [replica for replica in snapshot.replicas if replica.state == "serving"]
    if not serving:
        raise NotReadyError("no replica serves yet; try again in a moment")
    least_busy = min(serving, key=lambda replica: replica.slots_busy / replica.slots)
    messages = [ChatMessage("user", prompt)]
    client = PolicyClient(least_busy.address, credentials=location.credentials)
    async with client, aclosing(client.generate(messages, sampling, n)) as rollouts:
        return [rollout async for rollout in rollouts]
