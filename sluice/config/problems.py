"""One error for everything that is wrong with a configuration."""

from __future__ import annotations

from collections.abc import Sequence

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
