"""`sluice status`: what a run is doing now."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sluice.cli.live_view import last_accuracy
from sluice.cli.run_location import RunLocation, locate_run
from sluice.cli.run_table import run_table
from sluice.client.run_monitor import RunMonitor, RunSnapshot

RunArgument = Annotated[
    Path, typer.Argument(help="Folder of the run (its sluice.run_dir).", show_default=True)
]


def status(
    run: RunArgument = Path("runs/quickstart"),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show step, accuracy, group composition, idle shares and replicas of a run.

    Example:

      sluice status runs/quickstart
    """
    snapshot = asyncio.run(_snapshot(locate_run(run)))
    if as_json:
        typer.echo(json.dumps(asdict(snapshot), sort_keys=True))
        return
    folder = run if run.is_dir() else run.parent
    Console().print(run_table(snapshot, last_accuracy(folder / "metrics.jsonl")))


async def _snapshot(location: RunLocation) -> RunSnapshot:
    async with RunMonitor(location.trainer, location.reward) as monitor:
        return await monitor.snapshot()
