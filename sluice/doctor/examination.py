"""List the checks, and run them in parallel, each with a deadline; a broken one hides no other.

The checks before the start find what keeps a run from working before any of its processes starts.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from sluice.config.problems import Problem, Severity
from sluice.doctor import configuration, files, machine, packages, prompts, reward
from sluice.doctor.finding import (
    DoctorContext,
    Finding,
    FindingSeverity,
    fine,
    problem,
    problem_of_text,
)
from sluice.errors import SluiceError

NOT_EXAMINED = "nothing is known about it, because the check did not end"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at.

    Attributes:
        name: the first word of each of its lines.
        about: what it looks at, in a few words.
        examine: gathers facts and judges them.
        needs_run: whether it has nothing to report without a run's configuration.
        deadline_s: seconds it may take.
        before_start: whether a run does not start with a problem that it finds.
        of_host: whether it looks at the host that processes run on.
    """

    name: str
    about: str
    examine: Callable[[DoctorContext], Iterable[Finding]]
    needs_run: bool = True
    deadline_s: float = 120.0
    before_start: bool = False
    of_host: bool = False


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All findings of a check."""

    check: Check
    findings: tuple[Finding, ...]


def examine(context: DoctorContext, checks: Sequence[Check]) -> Iterator[CheckResult]:
    """Yield the result of each check, in their order, as soon as it and those before it are there.

    All checks start at once. A late one becomes a problem, and its thread is left behind: it may
    wait for a file system or a peer that never answers, and ends with the process.
    """
    start_s = time.monotonic()
    running = [
        (check, _start_check(check, context))
        for check in checks
        if context.has_run or not check.needs_run
    ]
    for check, answer in running:
        left_s = max(0.0, start_s + check.deadline_s - time.monotonic())
        try:
            yield CheckResult(check, answer.get(timeout=left_s))
        except queue.Empty:
            late = problem(
                f"{check.about}: no answer within {check.deadline_s:g} s",
                NOT_EXAMINED,
                "look for a file system, driver or peer that hangs, and repeat when the machine "
                "is idle",
            )
            yield CheckResult(check, (late,))


def _start_check(check: Check, context: DoctorContext) -> queue.SimpleQueue[tuple[Finding, ...]]:
    answer: queue.SimpleQueue[tuple[Finding, ...]] = queue.SimpleQueue()
    threading.Thread(
        target=lambda: answer.put(_run_check(check, context)), name=check.name, daemon=True
    ).start()
    return answer


def _run_check(check: Check, context: DoctorContext) -> tuple[Finding, ...]:
    try:
        return tuple(check.examine(context)) or (fine(f"nothing to report: {check.about}"),)
    except SluiceError as error:
        return (problem_of_text(str(error), ""),)
    except Exception as error:  # noqa: BLE001 - a defect of one check must not hide the others
        message = f"{check.about}: {type(error).__name__}: {error}"
        return (problem(message, NOT_EXAMINED, "look at it by hand, and report the message"),)


CHECKS: tuple[Check, ...] = (
    Check("torch", "torch, driver and GPUs", packages.check_torch, needs_run=False),
    Check("npu", "NPUs, CANN and their variables", machine.check_npus, needs_run=False),
    Check(
        "sandbox",
        "the sandbox of programs",
        machine.check_sandbox,
        needs_run=False,
        before_start=True,
        of_host=True,
    ),
    Check("configuration", "its rules", configuration.check_configuration, before_start=True),
    Check("extras", "optional packages", packages.check_extras, before_start=True, of_host=True),
    Check("gpus", "devices for every process", machine.check_gpus, before_start=True, of_host=True),
    Check(
        "cores", "CPU cores for trainer ranks", machine.check_cores, before_start=True, of_host=True
    ),
    Check("model", "the model's folder", files.check_model, before_start=True),
    Check("data", "the files of prompts", prompts.check_data, before_start=True),
    Check("reward", "what grades responses", reward.check_reward, before_start=True),
    Check("environment", "what plays episodes", reward.check_environment, before_start=True),
    Check("memory", "the host's memory", machine.check_memory),
    Check("disk", "space for checkpoints", files.check_disk),
    Check("ports", "fixed ports", machine.check_ports, before_start=True, of_host=True),
    Check("security", "certificates and tokens", configuration.check_security, before_start=True),
)


def preflight(
    context: DoctorContext, selects: Callable[[Check], bool] = lambda _: True
) -> list[Problem]:
    """Return what the checks before the start find, each once: errors, and notes that a user would
    want to know.
    """
    checks = [check for check in CHECKS if check.before_start and selects(check)]
    problems = [
        _as_problem(result.check, finding)
        for result in examine(context, checks)
        for finding in result.findings
        if finding.severity is not FindingSeverity.OK
    ]
    return list({entry.text: entry for entry in problems}.values())


def _as_problem(check: Check, finding: Finding) -> Problem:
    # A check that is late knows nothing of the run, which may be as slow and work.
    is_error = finding.severity is FindingSeverity.PROBLEM and finding.why != NOT_EXAMINED
    severity = Severity.ERROR if is_error else Severity.NOTE
    message = finding.what if is_error or not finding.why else f"{finding.what}: {finding.why}"
    return Problem("", UNSET, message, finding.remedy, rule=check.name, severity=severity)
