"""`sluice eval`: validate the policy in training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.run_location import RunLocation, locate_run
from sluice.client.policy_client import PolicyClient, ValidationResult
from sluice.client.run_monitor import RunMonitor
from sluice.errors import NotReadyError


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")] = Path("runs/quickstart"),
    *,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Responses per prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
) -> None:
    """Run the validation set through the present policy of a run that is going on.

    Without options the run's own validation settings hold. Pause the run for numbers of one
    version only; otherwise the call fails when the version changes meanwhile.

    Example:

      sluice eval runs/quickstart -n 4 --temperature 0.7
    """
    result = asyncio.run(_evaluate(locate_run(run), n, temperature))
    for name, value in sorted(result.metrics.items()):
        typer.echo(f"{name}: {value:.4f}")


async def _evaluate(
    location: RunLocation, n: int | None, temperature: float | None
) -> ValidationResult:
    async with RunMonitor(location.trainer, location.reward) as monitor:
        version = (await monitor.snapshot()).version
    if version is None:
        raise NotReadyError("no policy version was published yet; try again in a moment")
    async with PolicyClient(location.reward) as client:
        return await client.evaluate(version, n=n, temperature=temperature)
