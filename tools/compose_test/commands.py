"""Programs that are run and waited for, with their deadline and what they said."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_LAST_LINES = 20


class CommandError(Exception):
    """A program failed or took too long; the message ends with its last lines."""


def output_of(
    *command: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """Standard output of a program.

    Raises:
        CommandError: it is missing, failed, or did not end in time.
    """
    text = " ".join(command)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{text}: no end within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = _last_lines(done.stdout.splitlines() + done.stderr.splitlines())
        raise CommandError(f"{text}: exit code {done.returncode}{said}")
    return done.stdout


def succeeds(*command: str, timeout_s: float, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a program ends in time and with code 0."""
    try:
        output_of(*command, timeout_s=timeout_s, environment=environment)
    except CommandError:
        return False
    return True


def _last_lines(lines: Sequence[str]) -> str:
    return "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])
