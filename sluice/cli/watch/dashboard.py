"""`sluice dashboard`: show a running or finished run in the browser."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import DEFAULT_RUN, RunArgument
from sluice.concurrency.process import SUPERVISOR_VARIABLE, end_with_supervisor, stop_on_signals
from sluice.dashboard.serving import serve_page, write_report

_NICE = 10


def dashboard(
    run: RunArgument = DEFAULT_RUN,
    *,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: the system chooses.")] = 0,
    others: Annotated[
        list[Path] | None,
        typer.Option("--compare", metavar="RUN", help="Show this run beside it; repeatable."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page with its data to a file, and end."),
    ] = None,
) -> None:
    """Show a run in the browser: curves, groups, fleet, use of time and tokens, samples, logs.

    Serves a page that needs no other network; it reads the run's folder and asks the services of a
    running run. Ends with Ctrl-C. On other interfaces than loopback it requires a token of
    sluice.security.token_file.

    \b
    Examples:
      sluice dashboard runs/quickstart --port 8080
      sluice dashboard runs/two --compare runs/one
      sluice dashboard runs/quickstart --export report.html
    """
    if export is not None:
        write_report(run, export, others or ())
        typer.echo(f"report: {export}")
        return
    end_with_supervisor()
    if SUPERVISOR_VARIABLE in os.environ:
        os.nice(_NICE)  # started by a trainer, which comes first
    asyncio.run(_serve(run, host, port, others or ()))


async def _serve(run: Path, host: str, port: int, others: Sequence[Path]) -> None:
    stop = asyncio.Event()
    with stop_on_signals(stop):
        await serve_page(run, host, port, others=others, stop=stop, on_address=_print_address)


def _print_address(url: str) -> None:
    typer.echo(f"dashboard: {url}")
