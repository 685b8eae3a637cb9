"""What is wrong with a configuration: a broken rule with its remedies, and one error for all of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.errors import ConfigError


def raise_problems(problems: Sequence[str], source: str) -> None:
    """Does nothing without problems.

    Args:
        problems: sentences; each names a key, its value and the remedy.
        source: where the configuration came from.

    Raises:
        ConfigError: lists all of `problems`.
    """
    if len(problems) == 1:
        raise ConfigError(f"configuration ({source}): {problems[0]}")
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"configuration ({source}): {len(problems)} problems{lines}")


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule.

    Args:
        rule: short name of the rule, for tests and machines.
        text: a sentence with the keys, their values and the remedy.
        remedy: overrides that would satisfy the rule; empty where only a person can decide.
        here: whether sluice itself cannot run so; otherwise only verl would refuse.
    """

    rule: str
    text: str
    remedy: tuple[str, ...] = ()
    here: bool = True


def violation(rule: str, what: str, *remedy: str, here: bool = False) -> Violation:
    """A violation whose sentence ends with its remedy."""
    return Violation(rule, f"{what}; set {' '.join(remedy)}", remedy, here)
