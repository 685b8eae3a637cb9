"""Metrics as event files for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

from services.trainer.metrics.sinks import TABLE_COLUMNS, ValidationSample

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import SinkTarget

FOLDER_VARIABLE = "TENSORBOARD_DIR"


class TensorBoardSink:
    """Writes to ``<run dir>/tensorboard``, or to ``TENSORBOARD_DIR`` as under verl.

    Of steps that are recorded anew TensorBoard shows only the later record.
    """

    def __init__(self, target: SinkTarget) -> None:
        folder = os.environ.get(FOLDER_VARIABLE) or target.run_dir / "tensorboard"
        first = None if target.replaces_after is None else target.replaces_after + 1
        self._writer = SummaryWriter(log_dir=str(Path(folder)), purge_step=first)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Adds them as one Markdown table."""
        rows = [(str(step), _cell(g.input), _cell(g.output), f"{g.score:g}") for g in generations]
        lines = [TABLE_COLUMNS, ("---",) * len(TABLE_COLUMNS), *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        self._writer.add_text("val/generations", table, step)
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


def _cell(text: str) -> str:
    """Keeps `text` within a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
