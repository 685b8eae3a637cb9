"""Metrics to Trackio: a local database that ``trackio show`` draws."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from services.trainer.metrics.sinks import TABLE_COLUMNS, ValidationSample

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import SinkTarget

FOLDER_VARIABLE = "TRACKIO_DIR"
_REFUSED_IN_PROJECTS = re.compile(r"[^\w\-]+", re.ASCII)  # the file is named after the project
_RESERVED = frozenset({"project", "run", "timestamp", "step", "time"})


class TrackioSink:
    """One run in the project, in ``TRACKIO_DIR`` or else ``<run dir>/trackio``."""

    def __init__(self, target: SinkTarget) -> None:
        # Trackio reads the variable while it is imported.
        os.environ.setdefault(FOLDER_VARIABLE, str((target.run_dir / "trackio").absolute()))
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=_REFUSED_IN_PROJECTS.sub("-", target.project),
            name=target.experiment,
            config=dict(target.settings),
            embed=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the step; Trackio's own column names get an underscore."""
        self._run.log({f"{n}_" if n in _RESERVED else n: v for n, v in metrics.items()}, step=step)

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Logs a table ``val/generations``."""
        rows = [[step, one.input, one.output, one.score] for one in generations]
        table = self._trackio.Table(columns=list(TABLE_COLUMNS), data=rows)
        self._run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()
