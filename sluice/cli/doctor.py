"""`sluice doctor`: check whether this machine is fit for a run, before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from sluice.cli.arguments import AsJson, TrustScript, split_arguments
from sluice.cli.terminal import output_console, print_json
from sluice.doctor.examination import CHECKS, CheckResult, examine
from sluice.doctor.finding import FindingSeverity, read_doctor_context
from sluice.safe_text import printable

_STYLES = {
    FindingSeverity.OK: "green",
    FindingSeverity.WARNING: "yellow",
    FindingSeverity.PROBLEM: "bold red",
}
_SEVERITY_WIDTH, _NAME_WIDTH = 8, 15
_INDENT = " " * (_SEVERITY_WIDTH + _NAME_WIDTH + 1)


def print_result(console: Console, result: CheckResult) -> None:
    """Print a line for each finding, and below it why it matters and what to do."""
    for finding in result.findings:
        line = Text(f"{finding.severity:<{_SEVERITY_WIDTH}}", style=_STYLES[finding.severity])
        line += Text(f"{result.check.name:<{_NAME_WIDTH}} {printable(finding.what)}", style="")
        console.print(line, soft_wrap=True)
        for label, text in (("why", finding.why), ("remedy", finding.remedy)):
            if text:
                console.print(Text(f"{_INDENT}{label}: {printable(text)}"), soft_wrap=True)


def verdict(num_problems: int, num_warnings: int, *, has_run: bool) -> str:
    """Return the last line: how many problems and warnings."""
    problems, warnings = _count_text(num_problems, "problem"), _count_text(num_warnings, "warning")
    counts = f"{problems}, {warnings}.".capitalize()
    if has_run:
        return counts
    return f"{counts} No run was named: name its configuration to check what it needs."


def _count_text(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def results_as_json(results: Sequence[CheckResult]) -> list[dict[str, str]]:
    """Return an object for each finding; a severity is "ok", "warning" or "problem"."""
    return [
        {"check": result.check.name, **asdict(finding)}
        for result in results
        for finding in result.findings
    ]


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="The run: a YAML file or a verl launch script, and keys to override in verl's "
            "spelling. None: only the checks for every run.",
            show_default=False,
        ),
    ] = None,
    *,
    trust_script: TrustScript = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine before a run: what is wrong, why it matters, and what to do.

    Checks torch, NPUs and the sandbox and, if a run is named, its configuration, packages, devices,
    model, data, reward function, environment, memory, disk, ports and certificates. Starts
    and changes nothing. The exit code is 1 if there is a problem; warnings leave it at 0.

    \b
    Examples:
      sluice doctor
      sluice doctor run.yaml
      sluice doctor run.yaml sluice.rollout.replicas=4 --json
    """
    examined = read_doctor_context(*split_arguments(arguments, trust_script=trust_script))
    console = output_console()
    results: list[CheckResult] = []
    for result in examine(examined, CHECKS):
        results.append(result)
        if not as_json:
            print_result(console, result)
    counts = Counter(finding.severity for result in results for finding in result.findings)
    problems, warnings = counts[FindingSeverity.PROBLEM], counts[FindingSeverity.WARNING]
    if as_json:
        print_json(
            {
                "ok": not problems,
                "has_run": examined.has_run,
                "problems": problems,
                "warnings": warnings,
                "findings": results_as_json(results),
            }
        )
    else:
        console.print(verdict(problems, warnings, has_run=examined.has_run), soft_wrap=True)
    if problems:
        raise typer.Exit(1)
