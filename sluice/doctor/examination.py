"""Runs checks beside each other, each with a deadline; a broken one hides no other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, problem_of_sentence
from sluice.errors import SluiceError

Examine = Callable[[Examined], Iterable[Finding]]

DEADLINE_S = 30.0
NOT_EXAMINED = "it was not examined, so nothing is known about it"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at.

    Attributes:
        name: for people and machines.
        about: what it looks at, in a few words.
        examine: gathers facts and judges them.
        needs_run: whether it says nothing without a run's configuration.
        deadline_s: seconds it may take.
    """

    name: str
    about: str
    examine: Examine
    needs_run: bool = False
    deadline_s: float = DEADLINE_S


@dataclass(frozen=True, slots=True)
class Result:
    """All that a check has found."""

    check: Check
    findings: tuple[Finding, ...]


def examine(examined: Examined, checks: Sequence[Check]) -> Iterator[Result]:
    """Yields the result of each check, in their order, as soon as it and those before it are there.

    All start at once. One that is late is told as a problem and left behind: its thread may wait
    for a file system or a peer that never answers, and ends with the process.
    """
    asked = [check for check in checks if examined.has_run or not check.needs_run]
    start_s = time.monotonic()
    answers = [_started(check, examined) for check in asked]
    for check, answer in zip(asked, answers, strict=True):
        left_s = max(0.0, start_s + check.deadline_s - time.monotonic())
        try:
            yield Result(check, answer.get(timeout=left_s))
        except queue.Empty:
            yield Result(check, (_late(check),))


def _started(check: Check, examined: Examined) -> queue.SimpleQueue[tuple[Finding, ...]]:
    answer: queue.SimpleQueue[tuple[Finding, ...]] = queue.SimpleQueue()
    threading.Thread(
        target=lambda: answer.put(_findings(check, examined)), name=check.name, daemon=True
    ).start()
    return answer


def _findings(check: Check, examined: Examined) -> tuple[Finding, ...]:
    try:
        return tuple(check.examine(examined)) or (fine(f"nothing to say about {check.about}"),)
    except SluiceError as error:
        return (problem_of_sentence(str(error), ""),)
    except Exception as error:  # noqa: BLE001 - a defect of one check must not hide the others
        what = f"{check.about}: {type(error).__name__}: {error}"
        return (problem(what, NOT_EXAMINED, "look at it by hand, and report the message"),)


def _late(check: Check) -> Finding:
    return problem(
        f"{check.about}: no answer within {check.deadline_s:g} s",
        NOT_EXAMINED,
        "look for a file system, driver or peer that hangs, and repeat when the machine is idle",
    )
