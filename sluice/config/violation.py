"""A broken rule of the configuration."""

from __future__ import annotations

from dataclasses import dataclass


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
