"""The newest lines of the services' logs. They hold texts of models: they stay text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_FOLDER = "logs"
_SUFFIX = ".log"
_MOST_BYTES = 128 << 10
_MOST_LINES = 400
_FIRST = ("trainer", "reward")


def log_names(run_dir: Path) -> list[str]:
    """Return the services with a log: trainer and reward service first."""
    try:
        found = [
            entry.name
            for entry in os.scandir(run_dir / _FOLDER)
            if entry.is_file(follow_symlinks=False)
        ]
    except OSError:
        return []
    names = [name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)]
    return sorted(names, key=lambda name: (not name.startswith(_FIRST), name != _FIRST[0], name))


def log_tail(run_dir: Path, service: str) -> dict[str, Any]:
    """Return the newest lines of a service's log, and the services that have one.

    Args:
        run_dir: the run's folder.
        service: one of `log_names`; for any other there are no lines.
    """
    names = log_names(run_dir)
    lines: list[str] = []
    is_cut = False
    if service in names:
        try:
            with (run_dir / _FOLDER / f"{service}{_SUFFIX}").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = max(0, size - _MOST_BYTES)
                file.seek(begin)
                text = file.read(_MOST_BYTES).decode(errors="replace")
        except OSError as error:
            text, begin = f"cannot be read: {error}\n", 0
        lines = text.split("\n")
        if begin:  # the first one lacks its beginning; without another one its end is shown
            lines = lines[1:] if any(lines[1:]) else [f"... {lines[0]}"]
        is_cut = begin > 0 or len(lines) > _MOST_LINES
        lines = [line for line in lines if line][-_MOST_LINES:]
    return {"services": names, "service": service, "lines": lines, "is_cut": is_cut}
