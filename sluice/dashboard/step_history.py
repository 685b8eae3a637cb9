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
from sluice.report.run_record import METRICS_NAME, accuracy_of
from sluice.telemetry import metric_names

COLUMNS = (
    metric_names.REWARD,
    metric_names.GROUPS_KEPT,
    "train/groups_all_right",
    "train/groups_all_wrong",
    "train/groups_uniform",
    "train/groups_stale",
    "train/groups_failed",
    "train/groups_surplus",
    metric_names.GENERATED_TOKENS,
    metric_names.TRAINED_TOKENS,
    metric_names.STALENESS_MEAN,
    metric_names.STALENESS_MAX,
    metric_names.TOKENS_PER_S,
    metric_names.TRAINER_IDLE,
    metric_names.ROLLOUT_IDLE,
    metric_names.STEP_S,
)
"""The metrics that are kept of each step: 8 bytes a number."""
_decode_step = msgspec.json.Decoder(dict[str, float | None]).decode
_NAN = float("nan")
_MOST_STEP = (1 << 31) - 1


class StepHistory:
    """Columns of numbers by step. A step that was trained again counts once, by its later line.

    Attributes:
        accounts: the accounting after the newest step, by the names of `accounts.json`.
        newest: all metrics of the newest line of a step.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tail = LineTail(run_dir / METRICS_NAME)
        self._clear()

    def _clear(self) -> None:
        self._steps = array("q")
        self._columns = {name: array("d") for name in COLUMNS}
        self._accuracy: dict[int, float] = {}
        self.accounts: Mapping[str, float] = {}
        self.newest: Mapping[str, float | None] = {}
        self._num_undecoded = 0

    def read(self) -> bool:
        """Read a bounded number of lines; return whether more may be there already.

        Raises:
            OSError: the file cannot be read.
        """
        taken = self._tail.take()
        if taken.is_reset:
            self._clear()
        for line in taken.lines:
            self._note(line.text)
        return taken.has_more

    @property
    def num_unread(self) -> int:
        """Lines that are not a JSON object of numbers, or are too long."""
        return self._num_undecoded + self._tail.num_left_out

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """[steps] The steps in rising order."""
        return np.array(self._steps, dtype=np.int64)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return one of `COLUMNS` as [steps]; NaN for a step without it."""
        return np.array(self._columns[name], dtype=np.float64)

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
        if abs(step) > _MOST_STEP:
            self._num_undecoded += 1
            return
        if metric_names.STEP in row:
            self._note_step(step, row)
        elif (accuracy := accuracy_of(row)) is not None:
            self._accuracy[step] = accuracy

    def _note_step(self, step: int, row: Mapping[str, float | None]) -> None:
        place = bisect_left(self._steps, step)
        is_known = place < len(self._steps) and self._steps[place] == step
        if not is_known:
            self._steps.insert(place, step)
        for name, column in self._columns.items():
            value = row.get(name)
            number = _NAN if value is None else value
            if is_known:
                column[place] = number
            else:
                column.insert(place, number)
        self.newest = row
        accounting = {
            name.removeprefix(metric_names.ACCOUNTS): value
            for name, value in row.items()
            if name.startswith(metric_names.ACCOUNTS) and value is not None
        }
        self.accounts = accounting or self.accounts
