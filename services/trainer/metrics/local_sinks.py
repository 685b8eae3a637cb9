"""Sinks without a vendor: JSON lines on disk, and one log line per step."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import SinkTarget
    from services.trainer.metrics.step_metrics import Example


logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"


class JsonlSink:
    """The files ``metrics.jsonl`` and ``generations.jsonl``, written without buffering.

    NaN and infinity become null, so that every reader can parse the lines.
    """

    def __init__(self, target: SinkTarget) -> None:
        self._metrics = LineFile(target.run_dir / METRICS_FILE)
        self._generations = target.run_dir / GENERATIONS_FILE

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        finite = {k: (v if math.isfinite(v) else None) for k, v in sorted(metrics.items())}
        self._metrics.append({"step": step, **finite})

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Append a line per response."""
        file = LineFile(self._generations)
        try:
            for one in examples:
                score = one.score if math.isfinite(one.score) else None
                file.append(
                    {"step": step, "input": one.prompt, "output": one.response, "score": score}
                )
        finally:
            file.close()

    def close(self) -> None:
        """Close the file."""
        self._metrics.close()


class LineFile:
    """A file of whole lines: one that a full disk or a kill cut off never joins the next one.

    Args:
        path: created with its folder if missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._is_torn = _ends_within_a_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, object]) -> None:
        """Append one object as a line.

        Raises:
            OSError: the line is not completely on disk.
        """
        line = json.dumps(row).encode() + b"\n"
        payload = b"\n" + line if self._is_torn else line
        self._is_torn = True  # until the whole line is written
        written = self._file.write(payload)
        if written != len(payload):
            raise OSError(f"{self._file.name}: only {written} of {len(payload)} bytes written")
        self._is_torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


class ConsoleSink:
    """Log lines in verl's form: ``step:N - key:value - ...``."""

    def __init__(self, target: SinkTarget | None = None) -> None:
        del target  # only files and vendors need it

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one line."""
        parts = [f"{name}:{value:.6g}" for name, value in sorted(metrics.items())]
        logger.info("%s", " - ".join([f"step:{step}", *parts]))

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Log a line per response, with line ends written as ``\\n``."""
        for one in examples:
            logger.info(
                "step:%d - input:%r - output:%r - score:%g",
                step,
                one.prompt,
                one.response,
                one.score,
            )

    def close(self) -> None:
        """Do nothing: no file is open."""
