"""The numbers of a run as the trainer wrote them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sluice.errors import DataError
from sluice.telemetry.metric_names import STEP, VAL_CORE

Row = Mapping[str, float | None]

METRICS_NAME = "metrics.jsonl"
ACCOUNTS_NAME = "accounts.json"
# The errors of a line that a full disk or a lost machine cut off, or that another program wrote.
_UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


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

    def maximum(self, name: str) -> float:
        """Return the maximum of a metric over all steps; 0 without steps."""
        return max((row.get(name) or 0.0 for row in self.steps), default=0.0)

    def accuracies(self) -> tuple[AccuracyPoint, ...]:
        """Return held-out accuracy by step, in order."""
        accuracies = ((row, accuracy_of(row)) for row in self.validations)
        return tuple(
            AccuracyPoint(_step(row), value) for row, value in accuracies if value is not None
        )


def accuracy_of(row: Row) -> float | None:
    """Return the mean over samples and prompts, then over data sources; None without validation."""
    values = [
        value
        for name, value in row.items()
        if name.startswith(VAL_CORE) and "/acc/mean@" in name and value is not None
    ]
    return fmean(values) if values else None


def read_progress(run_dir: Path) -> RunRecord:
    """Read the record of a run that may not have ended, without lines that cannot be read.

    Of a repeated validation the last line counts; of steps see `drop_rows_from`.

    Raises:
        DataError: `accounts.json` is malformed.
    """
    metrics, accounts = run_dir / METRICS_NAME, run_dir / ACCOUNTS_NAME
    steps, validations = _valid_rows(_read_rows(metrics) if metrics.is_file() else [])
    return RunRecord(steps, validations, _read_accounts(accounts) if accounts.is_file() else {})


def drop_rows_from(
    step: int, steps: MutableSequence[int], columns: Iterable[MutableSequence[Any]]
) -> bool:
    """Drop the rows of `step` and of later steps, before a new row of `step` is added.

    The run went back to a checkpoint before it. What it had trained from there on is void, also
    where it is not trained again.

    Args:
        step: the number of the new row.
        steps: numbers of the rows, rising.
        columns: one entry per row in each.

    Returns:
        whether there were such rows.
    """
    place = bisect_left(steps, step)
    is_void = place < len(steps)
    for column in (steps, *columns):
        del column[place:]
    return is_void


def _read_rows(file: Path) -> list[Row]:
    # The trainer is still writing the text after the last newline.
    rows = []
    for line in file.read_bytes().split(b"\n")[:-1]:
        with suppress(*_UNREADABLE):
            row = json.loads(line)
            _step(row)
            rows.append(row)
    return rows


def _valid_rows(rows: Iterable[Row]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the valid rows of steps and of validations, by step."""
    steps: list[int] = []
    trained: list[Row] = []
    validated: dict[int, Row] = {}
    for row in rows:
        step = _step(row)
        if STEP not in row:
            validated[step] = row
            continue
        if drop_rows_from(step, steps, [trained]):
            validated = {
                validated_step: row
                for validated_step, row in validated.items()
                if validated_step < step
            }
        steps.append(step)
        trained.append(row)
    return tuple(trained), tuple(validated[step] for step in sorted(validated))


def _read_accounts(file: Path) -> dict[str, float]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: not a JSON object ({error}); remove the file") from error


def _step(row: Row) -> int:
    return int(row["step"] or 0)
