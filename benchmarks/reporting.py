"""What every benchmark needs: the checkout's root, lines that appear at once, runs in turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def print_line(line: str) -> None:
    """Print a line, and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def alternate(kinds: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return figures of each kind; take turns, so that other load of the machine meets all."""
    figures: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, measure in kinds.items():
            figures[kind].append(measure())
    return figures
