"""`sluice status`: what a run is doing now, or how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run
from sluice.cli.running_run import PastRun, ask_run, past_run
from sluice.cli.terminal import output_console, print_json, print_line
from sluice.cli.watch.live_view import run_accuracies, run_table
from sluice.client.run_address import locate_run
from sluice.client.wait_chain import MIN_REPORTED_S, Explanation, ServiceWaits, explain_run
from sluice.concurrency.waits import Waiting
from sluice.dashboard.step_history import StepHistory
from sluice.errors import ConfigError, NotReadyError
from sluice.launch.servicer import all_left, launched_processes
from sluice.report.progress import low_yield

_MOST_ROWS_A_SERVICE = 8


def status(
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    why: Annotated[
        bool,
        typer.Option(
            "--why", help="Show what each service waits for, and which service is the cause."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show step, accuracy, group composition, idle shares, replicas and accounting of a run.

    The accounting is the use of all generated tokens and of all seconds of trainer and replicas.
    The residual is what it does not explain.

    For a run that is not active the command shows its last state.

    \b
    Examples:
      sluice status runs/quickstart
      sluice status --why runs/quickstart
    """
    run = named_run(run, run_option)
    folder = locate_run(run).run_dir
    try:
        if why and _show_why(run, as_json=as_json):
            return
        location, snapshot = asyncio.run(ask_run(run))
    except NotReadyError:
        _show_past(asyncio.run(past_run(folder)), folder, as_json=as_json)
        return
    except ConfigError as error:
        past = asyncio.run(past_run(folder))
        if past.phase != "finished":  # only its services know whether it is active
            raise
        _show_past(past, folder, as_json=as_json)
        typer.echo(f"note: its services could not be asked: {error}", err=True)
        return
    if as_json:
        print_json(asdict(snapshot))
        return
    console = output_console()
    console.print(run_table(snapshot, run_accuracies(StepHistory(folder))))
    print_line(console, f"trainer {location.trainer}, reward service {location.reward}")
    restarts = [p.restart_text for p in asyncio.run(launched_processes(folder)) or ()]
    for notice in filter(None, [low_yield(snapshot.metrics), *restarts]):
        print_line(console, f"notice: {notice}")


def _show_past(past: PastRun, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(past))
    else:
        typer.echo(past.as_text(folder))


def _show_why(run: Path, *, as_json: bool) -> bool:
    """Show what the services wait for; return false if none answers and none has a process."""
    location = locate_run(run)
    found = None if asyncio.run(all_left(location.run_dir)) else asyncio.run(explain_run(location))
    if found is None:
        return False
    if as_json:
        print_json(asdict(found))
    else:
        output_console().print(wait_table(found))
    return True


def wait_table(explanation: Explanation) -> RenderableType:
    """Render the cause, then one row per wait, the root's first."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("service", "waits for", "phase"):
        table.add_column(name, overflow="fold")
    table.add_column("since", justify="right", no_wrap=True)
    for service in explanation.services:
        for row in _rows(service):
            table.add_row(*(Text(cell) for cell in row))
    return Group(Text(explanation.cause, style="bold"), table)


def _rows(service: ServiceWaits) -> Iterator[tuple[str, str, str, str]]:
    if service.failure:
        process = f"; process {service.pid} is {service.process}" if service.process else ""
        unheard = "" if service.unheard_s is None else f"{service.unheard_s:.0f} s"
        yield service.name, "-", f"{service.failure}{process}", unheard
        return
    if service.still_s is not None and service.still_s >= MIN_REPORTED_S:
        yield service.name, "-", "no progress although it has work", f"{service.still_s:.0f} s"
    reported = [wait for wait in service.waits if wait.seconds >= MIN_REPORTED_S]
    for wait in reported[:_MOST_ROWS_A_SERVICE]:
        yield service.name, wait.peer, _phase(wait), f"{wait.seconds:.0f} s"
    left_out = len(reported) - _MOST_ROWS_A_SERVICE
    if left_out > 0:
        yield service.name, "...", f"{left_out} more; all of them with --json", ""
    if not reported:
        yield service.name, "-", "no service for longer than a second", ""


def _phase(wait: Waiting) -> str:
    return f"{wait.phase} ({wait.count} times)" if wait.count > 1 else wait.phase
