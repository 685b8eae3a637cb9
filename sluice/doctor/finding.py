"""What a check says about one thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is.

    OK: as it should be. WARNING: a run works, slower or at a risk. PROBLEM: a run fails, or does
    something else than it was told.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: how bad it is.
        what: the thing and its value.
        why: what it would lead to; empty if all is well, or if `what` says it.
        remedy: what to do; empty if all is well.
    """

    severity: Severity
    what: str
    why: str = ""
    remedy: str = ""


def fine(what: str) -> Finding:
    """As it should be."""
    return Finding(Severity.OK, what)


def warning(what: str, why: str, remedy: str) -> Finding:
    """A run works, slower or at a risk."""
    return Finding(Severity.WARNING, what, why, remedy)


def problem(what: str, why: str, remedy: str) -> Finding:
    """A run fails, or does something else than it was told."""
    return Finding(Severity.PROBLEM, what, why, remedy)


def problem_of_sentence(sentence: str, why: str) -> Finding:
    """The problem that a message tells: the thing, and behind its last semicolon the remedy."""
    what, semicolon, remedy = sentence.rpartition("; ")
    return problem(what, why, remedy) if semicolon else problem(sentence, why, "correct it")
