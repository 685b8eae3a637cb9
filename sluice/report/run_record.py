"""The numbers of a run as the trainer wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from sluice.errors import DataError
from sluice.telemetry.metric_names import STEP, VAL_CORE

Row = Mapping[str, float | None]

METRICS_NAME = "metrics.jsonl"
ACCOUNTS_NAME = "accounts.json"


@dataclass(frozen=True, slots=True)
class AccuracyPoint:
    """Held-out accuracy of the policy after `step` steps."""

    step: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Rows of `metrics.jsonl` by step (`steps`, `validations`), and `accounts.json`."""

    steps: tuple[Row, ...]
    validations: tuple[Row, ...]
    accounts: Mapping[str, float]

    @property
    def last_step(self) -> int:
        """The number of finished steps."""
        return _step(self.steps[-1]) if self.steps else 0

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps; a missing value counts as 0."""
        return sum(row.get(name) or 0.0 for row in self.steps)

    @property
    def validation_tokens(self) -> int:
        """Response tokens of all validations."""
        return int(sum(row.get("val/generated_tokens") or 0.0 for row in self.validations))

    def largest(self, name: str) -> float:
        """Return the maximum of a metric over all steps; 0 without steps."""
        return max((row.get(name) or 0.0 for row in self.steps), default=0.0)

    def accuracies(self) -> tuple[AccuracyPoint, ...]:
        """Return held-out accuracy by step, in order."""
        found = ((row, accuracy_of(row)) for row in self.validations)
        return tuple(AccuracyPoint(_step(row), value) for row, value in found if value is not None)


def accuracy_of(row: Row) -> float | None:
    """Return the mean over samples and prompts, then over data sources; None without validation."""
    values = [
        value
        for name, value in row.items()
        if name.startswith(VAL_CORE) and "/acc/mean@" in name and value is not None
    ]
    return fmean(values) if values else None


def read_progress(run_dir: Path) -> RunRecord:
    """Read the record of a run that may not have ended; of a repeated step the last line counts.

    Raises:
        DataError: a line or a file is malformed.
    """
    metrics, accounts = run_dir / METRICS_NAME, run_dir / ACCOUNTS_NAME
    rows = _rows(metrics) if metrics.is_file() else []
    return RunRecord(
        steps=_by_step(row for row in rows if STEP in row),
        validations=_by_step(row for row in rows if STEP not in row),
        accounts=_accounts(accounts) if accounts.is_file() else {},
    )


def _rows(file: Path) -> list[Row]:
    # The trainer is still writing the text after the last newline.
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
            _step(rows[-1])
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{file}, line {number}: not a JSON object with a step ({error}); remove the line"
            ) from error
    return rows


def _accounts(file: Path) -> dict[str, float]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: not a JSON object ({error}); remove the file") from error


def _by_step(rows: Iterable[Row]) -> tuple[Row, ...]:
    newest = {_step(row): row for row in rows}
    return tuple(newest[step] for step in sorted(newest))


def _step(row: Row) -> int:
    return int(row["step"] or 0)
