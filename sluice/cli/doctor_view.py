"""What `sluice doctor` found, for people and as one JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from sluice.cli.terminal_text import printable
from sluice.doctor.examination import Result
from sluice.doctor.finding import Finding, Severity

_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
_SEVERITY_WIDTH, _NAME_WIDTH = 8, 15
_INDENT = " " * (_SEVERITY_WIDTH + _NAME_WIDTH + 1)


def print_result(console: Console, result: Result) -> None:
    """A line for each finding, and below it why it matters and what to do."""
    for finding in result.findings:
        _print(console, result.check.name, finding)


def _print(console: Console, name: str, finding: Finding) -> None:
    severity = f"{finding.severity:<{_SEVERITY_WIDTH}}"
    line = Text(severity, style=_STYLES[finding.severity])
    line += Text(f"{name:<{_NAME_WIDTH}} {printable(finding.what)}", style="")
    console.print(line, soft_wrap=True)
    for label, text in (("why", finding.why), ("remedy", finding.remedy)):
        if text:
            console.print(Text(f"{_INDENT}{label}: {printable(text)}"), soft_wrap=True)


def verdict(results: Sequence[Result], *, has_run: bool) -> str:
    """The last line: how many problems and warnings."""
    counts = Counter(one.severity for result in results for one in result.findings)
    problems, warnings = counts[Severity.PROBLEM], counts[Severity.WARNING]
    found = f"{_number(problems, 'problem')}, {_number(warnings, 'warning')}.".capitalize()
    if has_run:
        return found
    return f"{found} Of no run in particular: name its configuration to check what it needs."


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def has_problem(results: Sequence[Result]) -> bool:
    """Whether a run would fail."""
    return any(one.severity is Severity.PROBLEM for result in results for one in result.findings)


def results_as_json(results: Sequence[Result], *, has_run: bool) -> dict[str, object]:
    """For machines; a severity is "ok", "warning" or "problem"."""
    counts = Counter(one.severity for result in results for one in result.findings)
    return {
        "ok": not has_problem(results),
        "has_run": has_run,
        "problems": counts[Severity.PROBLEM],
        "warnings": counts[Severity.WARNING],
        "findings": [
            {
                "check": result.check.name,
                "severity": str(one.severity),
                "what": one.what,
                "why": one.why,
                "remedy": one.remedy,
            }
            for result in results
            for one in result.findings
        ],
    }
