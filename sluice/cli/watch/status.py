"""`sluice status` and `sluice runs`: what a run does now, or how it and others ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sluice.cli.arguments import RUNS, AsJson, RunArgument, RunOption, named_run, started_runs
from sluice.cli.running_run import PastRun, ask_run, is_active, past_run
from sluice.cli.terminal import output_console, print_json, print_line, print_table
from sluice.cli.watch.live_view import run_accuracies, run_table
from sluice.client.run_address import locate_run
from sluice.client.wait_chain import MIN_REPORTED_S, Explanation, ServiceWaits, explain_run
from sluice.concurrency.waits import Waiting
from sluice.dashboard.step_history import StepHistory
from sluice.errors import ConfigError, NotReadyError, SluiceError
from sluice.launch.servicer import have_all_left, launched_processes
from sluice.report.progress import duration_text, low_yield_notice
from sluice.report.run_record import METRICS_NAME
from sluice.report.summary import read_summary
from sluice.service_contract import CONFIG_NAME

_MAX_ROWS_PER_SERVICE = 8


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
    for notice in filter(None, [low_yield_notice(snapshot.metrics), *restarts]):
        print_line(console, f"notice: {notice}")


def _show_past(past: PastRun, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(past))
    else:
        typer.echo(past.as_text(folder))


def _show_why(run: Path, *, as_json: bool) -> bool:
    """Show what the services wait for; return false if none answers and none has a process."""
    location = locate_run(run)
    explanation = (
        None if asyncio.run(have_all_left(location.run_dir)) else asyncio.run(explain_run(location))
    )
    if explanation is None:
        return False
    if as_json:
        print_json(asdict(explanation))
    else:
        output_console().print(wait_table(explanation))
    return True


def wait_table(explanation: Explanation) -> RenderableType:
    """Render the cause, then one row per wait, the root's first."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("service", "waits for", "phase"):
        table.add_column(name, overflow="fold")
    table.add_column("since", justify="right", no_wrap=True)
    for service in explanation.services:
        for row in _wait_rows(service):
            table.add_row(*(Text(cell) for cell in row))
    return Group(Text(explanation.cause, style="bold"), table)


def _wait_rows(service: ServiceWaits) -> Iterator[tuple[str, str, str, str]]:
    if service.failure:
        process = f"; process {service.pid} is {service.process}" if service.process else ""
        unheard = "" if service.unheard_s is None else f"{service.unheard_s:.0f} s"
        yield service.name, "-", f"{service.failure}{process}", unheard
        return
    if service.still_s is not None and service.still_s >= MIN_REPORTED_S:
        yield service.name, "-", "no progress although it has work", f"{service.still_s:.0f} s"
    reported = [wait for wait in service.waits if wait.seconds >= MIN_REPORTED_S]
    for wait in reported[:_MAX_ROWS_PER_SERVICE]:
        yield service.name, wait.peer, _wait_phase(wait), f"{wait.seconds:.0f} s"
    left_out = len(reported) - _MAX_ROWS_PER_SERVICE
    if left_out > 0:
        yield service.name, "...", f"{left_out} more; all of them with --json", ""
    if not reported:
        yield service.name, "-", "no service for longer than a second", ""


def _wait_phase(wait: Waiting) -> str:
    return f"{wait.phase} ({wait.count} times)" if wait.count > 1 else wait.phase


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run in a list.

    Attributes:
        run: its folder.
        state: running, finished, failed, stopped before its last step, out of sight on another
            machine, or unreadable.
        step: finished steps.
        total_steps: None: unknown, the length of the data decides.
        accuracy: of the last validation; None without one.
        age_s: seconds since it was started.
        quiet_s: seconds since its last finished step, or since its start.
    """

    run: str
    state: str
    step: int
    total_steps: int | None
    accuracy: float | None
    age_s: float
    quiet_s: float


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that holds the runs.")
    ] = RUNS,
    *,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder: state, step, held-out accuracy, age; the newest first.

    \b
    Example:
      sluice runs
    """
    if folder != RUNS and not folder.is_dir():
        raise ConfigError(f"runs: {folder} is no folder; give the folder that holds the runs")
    found_runs = asyncio.run(_list_runs(started_runs(folder)))
    if as_json:
        print_json({"runs": [asdict(listed_run) for listed_run in found_runs]})
    elif not found_runs:
        typer.echo(f"no runs in {folder.absolute()}")
    else:
        print_table(
            output_console(),
            "",
            ("run", "state", "step", "accuracy", "started", "last step"),
            map(_run_row, found_runs),
            right=("step", "accuracy", "started", "last step"),
        )


async def _list_runs(folders: list[Path]) -> list[ListedRun]:
    return [await _describe_run(folder) for folder in folders]


async def _describe_run(folder: Path) -> ListedRun:
    now_s, started_s = time.time(), (folder / CONFIG_NAME).stat().st_mtime
    metrics = folder / METRICS_NAME
    written_s = max(started_s, metrics.stat().st_mtime if metrics.is_file() else 0.0)
    try:
        past = await past_run(folder)
        state: str = "running" if await is_active(folder) else past.phase
    except (SluiceError, OSError):  # such as a run of another user
        return ListedRun(
            str(folder), "unreadable", 0, None, None, now_s - started_s, now_s - written_s
        )
    if state == "not running" or (state == "finished" and past.is_stopped):
        has_failed = read_summary(folder).get("outcome") == "failed"
        state = "failed" if has_failed else "stopped"
    accuracy = past.accuracies[-1] if past.accuracies else None
    return ListedRun(
        str(folder),
        state,
        past.step,
        past.total_steps,
        accuracy,
        now_s - started_s,
        now_s - written_s,
    )


def _run_row(run: ListedRun) -> tuple[str, ...]:
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    accuracy = "-" if run.accuracy is None else f"{run.accuracy:.3f}"
    ages = (f"{duration_text(age_s)} ago" for age_s in (run.age_s, run.quiet_s))
    return (run.run, run.state, f"{run.step}{total}", accuracy, *ages)
