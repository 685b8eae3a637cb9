"""Metrics and validation samples as JSON lines, and a log line a step."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.trainer.metrics.sinks import ValidationSample

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import SinkTarget


METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"


class JsonlSink:
    """``metrics.jsonl`` and ``generations.jsonl``; a line is on disk when written.

    What is no number becomes null, so that every reader can parse the line.
    """

    def __init__(self, target: SinkTarget) -> None:
        self._metrics = LineFile(target.run_dir / METRICS_FILE)
        self._generations = target.run_dir / GENERATIONS_FILE

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line."""
        finite = {k: (v if math.isfinite(v) else None) for k, v in sorted(metrics.items())}
        self._metrics.append({"step": step, **finite})

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Appends a line a sample."""
        file = LineFile(self._generations)
        try:
            for one in generations:
                score = one.score if math.isfinite(one.score) else None
                file.append(
                    {"step": step, "input": one.input, "output": one.output, "score": score}
                )
        finally:
            file.close()

    def close(self) -> None:
        """Closes the file."""
        self._metrics.close()


class LineFile:
    """Appends whole lines; a line torn by a full disk or a kill never runs into the next one.

    Args:
        path: made with its folder if missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._is_torn = _ends_within_a_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, object]) -> None:
        """Writes one object.

        Raises:
            OSError: the line is not, or not completely, on disk.
        """
        line = json.dumps(row).encode() + b"\n"
        payload = b"\n" + line if self._is_torn else line
        self._is_torn = True
        written = self._file.write(payload)
        if written != len(payload):
            raise OSError(f"{self._file.name}: only {written} of {len(payload)} bytes written")
        self._is_torn = False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


logger = logging.getLogger(__name__)


class ConsoleSink:
    """verl's form: ``step:N - key:value - ...``."""

    def __init__(self, target: SinkTarget | None = None) -> None:
        del target  # the same for every run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the line."""
        parts = [f"{name}:{value:.6g}" for name, value in sorted(metrics.items())]
        logger.info("%s", " - ".join([f"step:{step}", *parts]))

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Logs a line a sample, with line ends written as ``\\n``."""
        for one in generations:
            logger.info(
                "step:%d - input:%r - output:%r - score:%g", step, one.input, one.output, one.score
            )

    def close(self) -> None:
        """Nothing is held."""
