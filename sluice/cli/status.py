"""`sluice status`: what a run is doing now, or how it ended."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sluice.cli.accuracy_tail import AccuracyTail
from sluice.cli.run_location import locate_run
from sluice.cli.run_table import run_table
from sluice.cli.running_run import ask_run, past_run
from sluice.errors import NotReadyError
from sluice.report.run_record import METRICS_NAME


def status(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")] = Path("runs/quickstart"),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show step, accuracy, group composition, idle shares, replicas and books of a run.

    The books tell what became of all tokens that were generated, and where the seconds of trainer
    and replicas went. The residual is what they cannot explain.

    Of a run that is not going on it shows how far it came.

    \b
    Example:
      sluice status runs/quickstart
    """
    try:
        location, snapshot = asyncio.run(ask_run(run))
    except NotReadyError:
        folder = locate_run(run).run_dir
        past = past_run(folder)
        typer.echo(json.dumps(asdict(past), sort_keys=True) if as_json else past.as_text(folder))
        return
    if as_json:
        typer.echo(json.dumps(asdict(snapshot), sort_keys=True))
        return
    accuracy = AccuracyTail(location.run_dir / METRICS_NAME).newest()
    Console().print(run_table(snapshot, accuracy))
