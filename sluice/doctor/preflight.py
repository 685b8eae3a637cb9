"""Find all that keeps a run from working before any of its processes starts."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET

from sluice.config.problems import Problem, Severity
from sluice.doctor.examination import CHECKS, NOT_EXAMINED, Check, examine
from sluice.doctor.finding import Examined, Finding, FindingLevel


def preflight(
    examined: Examined, wanted: Callable[[Check], bool] = lambda _: True
) -> list[Problem]:
    """Return what the checks before the start find, each once: errors, and notes that a user would
    want to know.

    Args:
        examined: the machine and the run.
        wanted: chooses among these checks.
    """
    checks = [one for one in CHECKS if one.before_start and wanted(one)]
    found = [
        _as_problem(result.check, one)
        for result in examine(examined, checks)
        for one in result.findings
        if one.severity is not FindingLevel.OK
    ]
    return list({one.text: one for one in found}.values())


def _as_problem(check: Check, found: Finding) -> Problem:
    # A check that is late knows nothing of the run, which may be as slow and work.
    is_error = found.severity is FindingLevel.PROBLEM and found.why != NOT_EXAMINED
    severity = Severity.ERROR if is_error else Severity.NOTE
    message = found.what if is_error or not found.why else f"{found.what}: {found.why}"
    return Problem("", UNSET, message, found.remedy, rule=check.name, severity=severity)
