"""A run's numbers, from the files of its volume; works without the project installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run has written so far.

    `replicas` are those that served, step by step; `accuracy` is the last held-out accuracy.
    """

    step: int
    replicas: tuple[int, ...]
    accuracy: float | None


def read_metrics(file: Path) -> RunRecord:
    """Read metrics.jsonl; a line that is being written is passed over."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    steps = [row for row in rows if "training/global_step" in row]
    found = [value for row in rows if (value := _accuracy(row)) is not None]
    return RunRecord(
        int(steps[-1]["step"]) if steps else 0,
        tuple(int(row.get("rollout/replicas") or 0) for row in steps),
        found[-1] if found else None,
    )


def _accuracy(row: Mapping[str, float | None]) -> float | None:
    values = [
        value
        for name, value in row.items()
        if name.startswith("val-core/") and "/acc/mean@" in name and value is not None
    ]
    return fmean(values) if values else None
