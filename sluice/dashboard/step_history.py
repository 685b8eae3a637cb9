"""The numbers of all steps, read from a growing file."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sluice.dashboard.line_tail import UNREADABLE, LineTail
from sluice.report.run_record import METRICS_NAME, accuracy_of, drop_rows_from
from sluice.telemetry import metric_names

_MAX_METRICS = 2000  # more names than a run has; a file with more is not one
_decode_step = msgspec.json.Decoder(dict[str, float | None]).decode
_NAN = float("nan")
_MAX_STEP = (1 << 31) - 1


class _StepTable:
    """Columns of numbers by step, in rising order. A step that comes again replaces its row."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        return np.array(self._steps, dtype=np.int64)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        values = self._columns.get(name)
        if values is None:
            return np.full(len(self._steps), _NAN)
        return np.array(values, dtype=np.float64)

    def drop_rows_from(self, step: int) -> bool:
        return drop_rows_from(step, self._steps, self._columns.values())

    def note(self, step: int, row: Mapping[str, float | None]) -> None:
        place = bisect_left(self._steps, step)
        is_known = place < len(self._steps) and self._steps[place] == step
        if not is_known:
            self._steps.insert(place, step)
            for column in self._columns.values():
                column.insert(place, _NAN)
        for name in row.keys() - self._columns.keys():
            if len(self._columns) < _MAX_METRICS:
                self._columns[name] = array("d", [_NAN]) * len(self._steps)
        for name, column in self._columns.items():
            value = row.get(name)
            column[place] = _NAN if value is None else value


class StepHistory:
    """The numbers of steps and of validations, 8 bytes each.

    A step that was trained again voids what was known of it and of later ones (`drop_rows_from`).

    Attributes:
        accounts: the accounting after the newest step, by the names of `accounts.json`.
        newest: all metrics of the newest line of a step.
        newest_accuracy: step and accuracy of the newest line of a validation that has one.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tail = LineTail(run_dir / METRICS_NAME)
        self._clear()

    def _clear(self) -> None:
        self._trained, self._validated = _StepTable(), _StepTable()
        self._accuracy: dict[int, float] = {}
        self.accounts: Mapping[str, float] = {}
        self.newest: Mapping[str, float | None] = {}
        self.newest_accuracy: tuple[int, float] | None = None
        self._num_undecoded = 0

    def read(self) -> bool:
        """Read a bounded number of lines; return whether more may be there already.

        Raises:
            OSError: the file cannot be read.
        """
        new_lines = self._tail.read_new_lines()
        if new_lines.is_reset:
            self._clear()
        for line in new_lines.lines:
            self._note(line.text)
        return new_lines.has_more

    @property
    def num_unread(self) -> int:
        """Lines that are not a JSON object of numbers, or are too long."""
        return self._num_undecoded + self._tail.num_left_out

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """[steps] The steps in rising order."""
        return self._trained.steps

    @property
    def names(self) -> list[str]:
        """All metrics of steps and of validations, in alphabetical order."""
        return sorted({*self._trained.names, *self._validated.names} - {"step"})

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return a metric of the steps as [steps]; NaN for a step without it."""
        return self._trained.column(name)

    def series(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the steps and values [points] of a metric of steps or of validations."""
        rows = self._trained if name in self._trained.names else self._validated
        return rows.steps, rows.column(name)

    def accuracies(self) -> list[tuple[int, float]]:
        """Return step and held-out accuracy of each validation, by step."""
        return sorted(self._accuracy.items())

    def validated_steps(self) -> list[int]:
        """Return the steps with a validation, rising."""
        return sorted(self._accuracy)

    def _note(self, text: bytes) -> None:
        try:
            row = _decode_step(text)
            step = int(row["step"] or 0)
        except (*UNREADABLE, KeyError):
            self._num_undecoded += bool(text.strip())
            return
        if abs(step) > _MAX_STEP:
            self._num_undecoded += 1
            return
        if metric_names.STEP in row:
            if self._trained.drop_rows_from(step):
                self._validated.drop_rows_from(step)
                self._accuracy = {
                    earlier: a for earlier, a in self._accuracy.items() if earlier < step
                }
            self._trained.note(step, row)
            self.newest = row
            accounting = {
                name.removeprefix(metric_names.ACCOUNTS): value
                for name, value in row.items()
                if name.startswith(metric_names.ACCOUNTS) and value is not None
            }
            self.accounts = accounting or self.accounts
            return
        self._validated.note(step, row)
        if (accuracy := accuracy_of(row)) is not None:
            self._accuracy[step] = accuracy
            self.newest_accuracy = (step, accuracy)
