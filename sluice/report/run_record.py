"""A run's numbers as the trainer wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import DataError

Row = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class AccuracyPoint:
    """Held-out accuracy of the policy after `step` steps."""

    step: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`steps` and `validations` are rows of metrics.jsonl, `accounts` is accounts.json."""

    steps: tuple[Row, ...]
    validations: tuple[Row, ...]
    accounts: Mapping[str, float]

    def total(self, name: str) -> float:
        """Sum of one metric over all steps; 0 where it is missing."""
        return sum(row.get(name) or 0.0 for row in self.steps)

    def largest(self, name: str) -> float:
        """Maximum of one metric over all steps; 0 without any."""
        return max((row.get(name) or 0.0 for row in self.steps), default=0.0)

    def accuracies(self) -> tuple[AccuracyPoint, ...]:
        """Held-out accuracy (mean over samples) by step, in order."""
        points = []
        for row in self.validations:
            value = next(
                (v for k, v in row.items() if k.startswith("val-core/") and "/acc/mean@" in k), None
            )
            if value is not None:
                points.append(AccuracyPoint(int(row["step"] or 0), value))
        return tuple(sorted(points, key=lambda point: point.step))


def read_run(run_dir: Path) -> RunRecord:
    """Reads metrics.jsonl and accounts.json.

    Raises:
        DataError: one of them is missing.
    """
    metrics, accounts = run_dir / "metrics.jsonl", run_dir / "accounts.json"
    for file in (metrics, accounts):
        if not file.is_file():
            raise DataError(f"{file}: missing; the run did not reach its end")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return RunRecord(
        steps=tuple(row for row in rows if "training/global_step" in row),
        validations=tuple(row for row in rows if "training/global_step" not in row),
        accounts=json.loads(accounts.read_text(encoding="utf-8")),
    )
