"""`sluice eval`: validate the policy in training."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run
from sluice.cli.running_run import ask_run
from sluice.cli.terminal import print_json
from sluice.client.run_monitor import RunMonitor, ValidationResult
from sluice.concurrency.process import stop_on_signals
from sluice.errors import NotReadyError
from sluice.launch.processes.crew import unless

_EXIT_INTERRUPTED = 130
ResultT = TypeVar("ResultT")


def evaluate(
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Responses per prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for the end of the current step.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Validate the current policy of a running run.

    Training pauses after the current step and continues afterwards, unless another command holds
    it too: all numbers are of one policy version. Without options the run's own validation
    settings apply.

    \b
    Example:
      sluice eval runs/quickstart -n 4 --temperature 0.7
    """
    evaluated = asyncio.run(
        until_signal(_evaluate(named_run(run, run_option), n, temperature, wait))
    )
    if evaluated is None:
        typer.echo("interrupted; the run continues", err=True)
        raise typer.Exit(_EXIT_INTERRUPTED)
    step, result = evaluated
    if as_json:
        print_json({"step": step, "metrics": dict(result.metrics)})
        return
    typer.echo(f"policy after step {step}")
    # Metrics that verl calls core come first.
    by_rank = sorted(result.metrics.items(), key=lambda item: ("val-core/" not in item[0], item[0]))
    for name, value in by_rank:
        typer.echo(f"{name}: {value:.4f}")


async def _evaluate(
    run: Path, n: int | None, temperature: float | None, wait_s: float
) -> tuple[int, ValidationResult]:
    location, _ = await ask_run(run)
    monitor = RunMonitor(location.trainer, location.reward, credentials=location.credentials)
    async with monitor, monitor.held(wait_s) as held:
        if held.version is None:
            raise NotReadyError("no policy version was published yet; try again in a moment")
        return held.step, await monitor.evaluate(held.version, n=n, temperature=temperature)


async def until_signal(work: Coroutine[None, None, ResultT]) -> ResultT | None:
    """Return the result of `work`; None if SIGTERM or SIGINT cancelled it first."""
    stop = asyncio.Event()
    with stop_on_signals(stop):
        return await unless(stop, work)
