"""The newest held-out accuracy of a run, read from a metrics file that grows."""

from __future__ import annotations

import json
from pathlib import Path

from sluice.report.run_record import AccuracyPoint, accuracy_of


class AccuracyTail:
    """Reads each line of the file once; a line still being written waits for the next time."""

    def __init__(self, metrics_file: Path) -> None:
        self._file = metrics_file
        self._read_bytes = 0
        self._newest: AccuracyPoint | None = None

    def newest(self) -> AccuracyPoint | None:
        """The last validation's accuracy; none before the first."""
        if not self._file.is_file() or self._file.stat().st_size <= self._read_bytes:
            return self._newest
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            complete, _, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(complete) + 1 if complete else 0
        for line in complete.splitlines():
            if b'"val-core/' in line:
                self._note(json.loads(line))
        return self._newest

    def _note(self, row: dict[str, float | None]) -> None:
        accuracy = accuracy_of(row)
        if accuracy is not None:
            self._newest = AccuracyPoint(int(row["step"] or 0), accuracy)
