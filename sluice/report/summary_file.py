"""`summary.json` of a run: every reader and writer of sluice is here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.whole_file import write_whole

SUMMARY_NAME = "summary.json"
_OF_AN_END = "outcome"
"""The name that only the end of a run writes; a summary of an active run lacks it."""


def write_summary(run_dir: Path, numbers: Mapping[str, object]) -> None:
    """Write a run's summary; others see the former one or this one, never half of it.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    text = json.dumps(numbers, indent=2) + "\n"
    write_whole(run_dir / SUMMARY_NAME, text.encode())


def ended_summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary that the end of a run wrote; empty: there is none.

    A start removes the one of the run before it.
    """
    try:
        found = json.loads((run_dir / SUMMARY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and _OF_AN_END in found else {}
