"""Problems of a configuration and notes on it: one type for every rule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from msgspec import UNSET

from sluice.errors import ConfigError

_LONGEST = 200  # a path fits
_PLAIN = re.compile(r"[A-Za-z_./~<][\w./~:@+<>-]*")
_WORDS = {"true", "false", "null", "~"}


class Severity(StrEnum):
    """What a problem means for a run."""

    ERROR = "error"
    """sluice cannot run this."""
    WARNING = "warning"
    """verl would refuse it; sluice runs it."""
    NOTE = "note"
    """It runs, but perhaps not as expected."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a configuration as one sentence: the key, its value, the fault, and the remedy.

    Attributes:
        key: the key, in the user's spelling if there is one; empty if the sentence is about no key.
        value: the value of the key; `UNSET` if the sentence needs none.
        message: the rest of the sentence after ``key = value``.
        remedy: what to do; empty if `overrides` say it or nothing is wrong.
        overrides: ``key=value`` texts that fix it; empty if only a person can decide.
        rule: short name of the broken rule, for tests and machines.
    """

    key: str
    value: object
    message: str
    remedy: str = ""
    overrides: tuple[str, ...] = ()
    rule: str = ""
    severity: Severity = Severity.ERROR

    @property
    def statement(self) -> str:
        """The sentence without its remedy."""
        subject = self.key if self.value is UNSET else f"{self.key} = {shown(self.value)}"
        gap = " " if subject and self.message[:1] not in {":", ",", ";"} else ""
        return f"{subject}{gap}{self.message}"

    @property
    def advice(self) -> str:
        """What to do, as text."""
        return self.remedy or (f"set {' '.join(self.overrides)}" if self.overrides else "")

    @property
    def text(self) -> str:
        """The whole sentence, without a full stop."""
        return f"{self.statement}; {self.advice}" if self.advice else self.statement


def problem_of(error: ConfigError) -> Problem:
    """Return the problem that an error describes."""
    return Problem("", UNSET, str(error))


def verl_problem(
    rule: str, key: str, value: object, message: str, *overrides: str, is_error: bool = False
) -> Problem:
    """Return the problem of a broken rule of verl; with `is_error`, sluice cannot run it either."""
    severity = Severity.ERROR if is_error else Severity.WARNING
    return Problem(key, value, message, overrides=overrides, rule=rule, severity=severity)


def named(rule: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the problems with the name of their rule."""
    return (replace(problem, rule=rule) for problem in problems)


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that keep sluice from running."""
    return [problem for problem in problems if problem.severity is Severity.ERROR]


def raise_problems(problems: Sequence[Problem], source: str) -> None:
    """Raise an error if there are problems.

    Raises:
        ConfigError: lists all of `problems`.
    """
    if len(problems) == 1:
        raise ConfigError(f"configuration ({source}): {problems[0].text}")
    if problems:
        lines = "".join(f"\n  - {problem.text}" for problem in problems)
        raise ConfigError(f"configuration ({source}): {len(problems)} problems{lines}")


def shown(value: object, longest: int = _LONGEST) -> str:
    """Return a value as a user writes it in YAML, on one line, cut at `longest` characters."""
    text = _flow(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _flow(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, str):
        return value if _is_plain(value) else repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value)


def _is_plain(text: str) -> bool:
    """Return whether a string needs no quotes: it could not be read as something else."""
    if not _PLAIN.fullmatch(text) or text.lower() in _WORDS:
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False
