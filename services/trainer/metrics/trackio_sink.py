"""Sink for Trackio: a local database that ``trackio show`` plots."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from services.trainer.metrics.sinks import TABLE_COLUMNS

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import Example, SinkTarget

FOLDER_VARIABLE = "TRACKIO_DIR"
_REFUSED_IN_PROJECTS = re.compile(r"[^\w\-]+", re.ASCII)  # the file is named after the project
_RESERVED = frozenset({"project", "run", "timestamp", "step", "time"})


class TrackioSink:
    """One run in the project, in ``TRACKIO_DIR`` or else ``<run dir>/trackio``."""

    def __init__(self, target: SinkTarget) -> None:
        # Trackio reads this variable at import, so it is imported only now.
        os.environ.setdefault(FOLDER_VARIABLE, str((target.run_dir / "trackio").absolute()))
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=_REFUSED_IN_PROJECTS.sub("-", target.project),
            name=target.experiment,
            config=dict(target.settings),
            embed=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step; names that Trackio reserves get an underscore."""
        self._run.log({f"{n}_" if n in _RESERVED else n: v for n, v in metrics.items()}, step=step)

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Log a table ``val/generations``."""
        rows = [[step, example.prompt, example.response, example.score] for example in examples]
        table = self._trackio.Table(columns=list(TABLE_COLUMNS), data=rows)
        self._run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        self._run.finish()
