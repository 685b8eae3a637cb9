"""Sink for TensorBoard: event files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

from services.trainer.metrics.sinks import TABLE_COLUMNS

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import Example, SinkTarget

FOLDER_VARIABLE = "TENSORBOARD_DIR"


class TensorBoardSink:
    """Event files in ``<run dir>/tensorboard`` or, as under verl, in ``TENSORBOARD_DIR``.

    If a step is recorded twice, TensorBoard shows only the later record.
    """

    def __init__(self, target: SinkTarget) -> None:
        folder = os.environ.get(FOLDER_VARIABLE) or target.run_dir / "tensorboard"
        purge_step = None if target.replaces_after is None else target.replaces_after + 1
        self._writer = SummaryWriter(log_dir=str(Path(folder)), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Add the responses as one Markdown table."""
        rows = [(str(step), _cell(g.prompt), _cell(g.response), f"{g.score:g}") for g in examples]
        lines = [TABLE_COLUMNS, ("---",) * len(TABLE_COLUMNS), *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        self._writer.add_text("val/generations", table, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cell(text: str) -> str:
    """Escape `text` for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
