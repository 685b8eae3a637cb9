"""`sluice resume`: end the hold of a run by its guards, or by its operator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run
from sluice.cli.running_run import ask_run
from sluice.cli.terminal import print_json
from sluice.client.run_monitor import RunMonitor


def resume(
    run: RunArgument = None, *, run_option: RunOption = None, as_json: AsJson = False
) -> None:
    """Continue a run that a guard holds (sluice.guards), or its operator.

    sluice status shows why it is held. What the guards saw so far breaks no rule again.

    \b
    Examples:
      sluice resume runs/quickstart
    """
    folder, reason, step = asyncio.run(_resume(named_run(run, run_option)))
    if as_json:
        print_json({"run": str(folder), "step": step, "reason": reason})
        return
    was = f"it was held: {reason}" if reason else "no guard held it"
    typer.echo(f"{folder}: continues after step {step}; {was}")


async def _resume(run: Path) -> tuple[Path, str, int]:
    location, snapshot = await ask_run(run)
    async with RunMonitor(
        location.trainer, location.reward, credentials=location.credentials
    ) as monitor:
        return location.run_dir, snapshot.hold_reason, await monitor.resume()
