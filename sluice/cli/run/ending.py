"""The end of a run: its report and summary files, and the lines that a user reads last."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from sluice.algorithm.accounting import DATA_EXHAUSTED
from sluice.cli.running_run import newest_step, resume_command
from sluice.cli.terminal import print_json, print_line
from sluice.config.derived import checkpoint_folder
from sluice.config.run import RunConfig
from sluice.dashboard.serving import write_report
from sluice.errors import SluiceError
from sluice.launch.processes.supervisor import EXIT_INTERRUPTED, RunEnd
from sluice.report.progress import duration_text
from sluice.report.run_record import METRICS_NAME, RunRecord, read_progress
from sluice.report.summary import software_versions, summarize, write_summary
from sluice.safe_text import printable

REPORT_NAME = "report.html"
DATA_ENDED = "data exhausted"
"""Reason of a run that finished because its data set had no more prompts."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended, for `summary.json`.

    Attributes:
        outcome: ``stopped`` is an end before the last step by a `Stop` call.
        reason: the reason of the first failure, or that the data set has ended; may be empty.
        step: finished steps, including those before a resume.
        total_steps: steps of the whole run; None if its trainer never served.
        checkpoint: folder of the newest checkpoint, if any.
        checkpoint_step: its step.
    """

    outcome: Literal["finished", "stopped", "interrupted", "failed"]
    reason: str
    step: int
    total_steps: int | None
    checkpoint: str | None
    checkpoint_step: int | None


def outcome_of(
    config: RunConfig, end: RunEnd, record: RunRecord, total_steps: int | None
) -> RunOutcome:
    """Return how a run ended, from its processes' ends and its folder."""
    step = record.last_step
    outcome: Literal["finished", "stopped", "interrupted", "failed"] = "finished"
    reason = ""
    if end.failures:
        outcome, reason = "failed", _failure_reason(end.failures[0])
    elif end.exit_code == EXIT_INTERRUPTED:
        outcome = "interrupted"
    elif record.accounts.get(DATA_EXHAUSTED):
        reason = DATA_ENDED
    elif total_steps is not None and step < total_steps and not config.trainer.val_only:
        outcome = "stopped"
    saved = newest_step(config)
    return RunOutcome(
        outcome,
        reason,
        step,
        total_steps,
        None if saved is None else f"{checkpoint_folder(config)}/global_step_{saved}",
        saved,
    )


def _failure_reason(failure: str) -> str:
    """Return the process that failed and its last line: the error, as a rule."""
    head, *lines = failure.splitlines()
    return " ".join([head, *(line.strip() for line in lines[-1:])])


def _lines_not_shown(lines: list[str], shown_lines: Collection[str]) -> list[str]:
    return [lines[0], *(line for line in lines[1:] if line.strip() not in shown_lines)]


def end_run(
    config: RunConfig,
    end: RunEnd,
    console: Console,
    *,
    total_steps: int | None,
    seconds_total: float,
    seconds_services: float,
    shown_lines: Collection[str] = (),
    as_json: bool = False,
) -> None:
    """Write `summary.json` and `report.html` of a run that has ended, and print its last lines.

    Args:
        config: the run's configuration.
        end: the end of its processes.
        console: where to print.
        total_steps: of the whole run; None: unknown.
        seconds_total: of the whole command.
        seconds_services: from the start of its services to their end.
        shown_lines: log lines that the user has seen already.
        as_json: print the summary to standard output as one JSON object, as the last line.
    """
    run_dir = Path(config.sluice.run_dir)
    print_failures(end, console, shown_lines)
    record = read_progress(run_dir)
    outcome = outcome_of(config, end, record, total_steps)
    print_line(console, _first_line(outcome, seconds_total))
    summary = summarize(run_dir, seconds_total=seconds_total, seconds_services=seconds_services)
    if record.steps or record.validations:
        print_line(console, summary.as_text())
    numbers = {**asdict(summary), **asdict(outcome), "versions": software_versions()}
    _write_summary(run_dir, numbers, console)
    if record.steps or record.validations:
        _write_report(run_dir, console)
    for name, text in _next_steps(config, outcome):
        print_line(console, f"{name:<11} {text}")
    if as_json:
        print_json(numbers)


def print_failures(end: RunEnd, console: Console, shown_lines: Collection[str]) -> None:
    """Print why processes failed, without log lines that the user has seen already."""
    for failure in end.failures:
        text = "\n".join(_lines_not_shown(failure.splitlines(), shown_lines))
        console.print(Text("failed: ", style="red") + Text(printable(text)), soft_wrap=True)


def _first_line(outcome: RunOutcome, seconds: float) -> str:
    total = "" if outcome.total_steps is None else f" of {outcome.total_steps}"
    reason = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.outcome} after step {outcome.step}{total}, {duration_text(seconds)}{reason}"


def _next_steps(config: RunConfig, outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    run_dir = Path(config.sluice.run_dir)
    yield "checkpoint", outcome.checkpoint or "none"
    if (run_dir / REPORT_NAME).is_file():
        yield "report", str(run_dir / REPORT_NAME)
    if (run_dir / METRICS_NAME).is_file():
        yield "metrics", str(run_dir / METRICS_NAME)
    yield "logs", str(run_dir / "logs")
    again = resume_command(run_dir)
    start = "from the beginning"
    if outcome.checkpoint_step is not None:
        start = f"from step {outcome.checkpoint_step}"
    if outcome.reason == DATA_ENDED:
        yield "train on", f"{again} trainer.total_epochs={2 * config.trainer.total_epochs}"
    elif outcome.outcome == "finished":
        doubled = 2 * (outcome.total_steps or outcome.step)
        yield "train on", f"{again} trainer.total_training_steps={doubled}"
    else:
        yield "resume", f"{again}  # {start}"


def _write_report(run_dir: Path, console: Console) -> None:
    try:
        write_report(run_dir, run_dir / REPORT_NAME)
    except (OSError, SluiceError) as error:
        print_line(console, f"no report: {error}")


def _write_summary(run_dir: Path, summary: dict[str, object], console: Console) -> None:
    try:
        write_summary(run_dir, summary)
    except OSError as error:  # the folder is gone, or the disk is full
        print_line(console, f"no summary: {error}")
