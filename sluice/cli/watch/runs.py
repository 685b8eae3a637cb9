"""`sluice runs`: list the runs of a folder."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import RUNS, AsJson, started_runs
from sluice.cli.running_run import is_active, past_run
from sluice.cli.terminal import output_console, print_json, print_table
from sluice.errors import SluiceError
from sluice.report.progress import duration_text
from sluice.report.run_record import METRICS_NAME
from sluice.report.summary import ended_summary
from sluice.service_contract import CONFIG_NAME


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
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Holds the runs.")] = RUNS,
    *,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder: state, step, held-out accuracy, age; the newest first.

    \b
    Example:
      sluice runs
    """
    found = asyncio.run(_listed(started_runs(folder)))
    if as_json:
        print_json({"runs": [asdict(one) for one in found]})
    elif not found:
        typer.echo(f"no runs in {folder.absolute()}")
    else:
        print_table(
            output_console(),
            "",
            ("run", "state", "step", "accuracy", "started", "last step"),
            map(_row, found),
            right=("step", "accuracy", "started", "last step"),
        )


async def _listed(folders: list[Path]) -> list[ListedRun]:
    return [await _described(folder) for folder in folders]


async def _described(folder: Path) -> ListedRun:
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
        has_failed = ended_summary(folder).get("outcome") == "failed"
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


def _row(one: ListedRun) -> tuple[str, ...]:
    total = "" if one.total_steps is None else f"/{one.total_steps}"
    accuracy = "-" if one.accuracy is None else f"{one.accuracy:.3f}"
    ages = (f"{duration_text(age_s)} ago" for age_s in (one.age_s, one.quiet_s))
    return (one.run, one.state, f"{one.step}{total}", accuracy, *ages)
