"""Phases of a tool with their seconds, and waits with a deadline."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseError(Exception):
    """A phase did not end as it has to."""


class Phases:
    """Seconds by name, in order; printed as they come."""

    def __init__(self, seconds: dict[str, float] | None = None, prefix: str = "") -> None:
        self.seconds: dict[str, float] = {} if seconds is None else seconds
        self._prefix = prefix

    def named(self, part: str) -> Phases:
        """For a part of the work, whose name comes before the phases'; the same seconds."""
        return Phases(self.seconds, f"{part}: ")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block."""
        name = f"{self._prefix}{name}"
        began_s = time.monotonic()
        say(f"{name} ...")
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - began_s, 1)
            say(f"{name}: {self.seconds[name]:g} s")


def until(what: str, holds: Callable[[], bool], *, timeout_s: float, interval_s: float) -> None:
    """Wait.

    Raises:
        PhaseError: it did not come true in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise PhaseError(f"{what}: not within {timeout_s:g} s")
        time.sleep(interval_s)


def say(text: str) -> None:
    """One line for people."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
