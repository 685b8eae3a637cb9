"""`sluice dashboard`: show a running or finished run in the browser."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.watch.waits import explain
from sluice.concurrency.process import SUPERVISOR_VARIABLE, end_with_supervisor, stop_on_signals
from sluice.dashboard.serving import serve_page

_NICE = 10


def dashboard(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")] = Path("runs/quickstart"),
    *,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: the system chooses.")] = 0,
) -> None:
    """Show a run in the browser: curves, groups, fleet, where time and tokens go, samples.

    Serves a page that needs no other network; it reads the run's folder and asks the services of a
    run that goes on. Ends with Ctrl-C. On other interfaces than loopback it asks for a token of
    sluice.security.token_file.

    \b
    Example:
      sluice dashboard runs/quickstart --port 8080
    """
    end_with_supervisor()
    if SUPERVISOR_VARIABLE in os.environ:
        os.nice(_NICE)  # beside a trainer: it takes what that leaves
    asyncio.run(_serve(run, host, port))


async def _serve(run: Path, host: str, port: int) -> None:
    stop = asyncio.Event()
    with stop_on_signals(stop):
        await serve_page(run, host, port, explain=explain, stop=stop, on_address=_notify)


def _notify(url: str) -> None:
    typer.echo(f"the page of the run: {url}")
