"""A tool's command line, phases with their seconds, waits with a deadline, and last line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


class PhaseError(Exception):
    """A phase did not end as it has to."""


def tool_parser(document: str | None, example: str) -> argparse.ArgumentParser:
    """Return a parser for a tool.

    Args:
        document: the module's docstring, whose first line describes the tool.
        example: a command line; its first three words start the tool.
    """
    return argparse.ArgumentParser(
        prog=" ".join(example.split()[:3]),
        description=(document or "").splitlines()[0],
        epilog=f"example: {example}",
    )


class Phases:
    """Seconds by name, in order; printed as they come."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block."""
        began_s = time.monotonic()
        say(f"{name} ...")
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - began_s, 1)
            say(f"{name}: {self.seconds[name]:g} s")


def until(
    what: str, holds: Callable[[], object], *, timeout_s: float, interval_s: float = 0.2
) -> None:
    """Poll until `holds` is true.

    Raises:
        PhaseError: it did not come true in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise PhaseError(f"{what}: not within {timeout_s:g} s")
        time.sleep(interval_s)


def say(text: str) -> None:
    """Print one line for people."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def conclude_without(missing: Exception, variable: str, report: Mapping[str, object]) -> int:
    """Conclude where a program is missing: as skipped if the variable is 1, otherwise as failed."""
    say(f"MISSING: {missing}")
    if os.environ.get(variable) == "1":
        return conclude({"skipped": str(missing), **report}, [])
    return conclude(report, [str(missing)])


def conclude(report: Mapping[str, object], problems: Sequence[str]) -> int:
    """Print the problems, then the report as the last line, a JSON object; return the exit code."""
    for problem in problems:
        say(f"FAILED: {problem}")
    last = {"passed": not problems, **report, "problems": list(problems)}
    sys.stdout.write(json.dumps(last) + "\n")
    return 1 if problems else 0
