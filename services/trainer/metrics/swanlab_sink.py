"""Metrics to SwanLab, or to its offline files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import swanlab

from services.trainer.metrics.sinks import ValidationSample

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import SinkTarget

_REFUSED_IN_PROJECTS = re.compile(r"[^0-9a-zA-Z_\-+.]+")
_LONGEST_PROJECT, _LONGEST_EXPERIMENT, _LONGEST_KEY = 100, 250, 255


class SwanlabSink:
    """One experiment in the project, by ``SWANLAB_MODE``.

    Without that variable and without a key it writes offline to ``<run dir>/swanlog`` (or
    ``SWANLAB_LOG_DIR``), for ``swanlab sync``; it never asks for a login.
    """

    def __init__(self, target: SinkTarget) -> None:
        folder = Path(os.environ.get("SWANLAB_LOG_DIR") or target.run_dir / "swanlog")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=_REFUSED_IN_PROJECTS.sub("-", target.project)[:_LONGEST_PROJECT],
            experiment_name=target.experiment[:_LONGEST_EXPERIMENT],
            config=dict(target.settings),
            logdir=str(folder),
            settings=swanlab.Settings(log_proxy_type="none"),
            mode=os.environ.get("SWANLAB_MODE") or ("cloud" if _has_key() else "offline"),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the step."""
        self._run.log({_key(name): value for name, value in metrics.items()}, step=step)

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Logs a list of texts ``val/generations``, captioned with the score."""
        texts = [
            swanlab.Text(f"input: {one.input}\n\noutput: {one.output}", caption=f"{one.score:g}")
            for one in generations
        ]
        self._run.log({"val/generations": texts}, step=step)

    def close(self) -> None:
        """Sends or writes what is left."""
        self._run.finish()


def _key(name: str) -> str:
    """SwanLab takes no leading dot or slash and 255 characters."""
    return name.lstrip("./")[:_LONGEST_KEY]


def _has_key() -> bool:
    """Whether SwanLab would find a key without asking."""
    login = Path(os.environ.get("SWANLAB_SAVE_DIR", "~/.swanlab")).expanduser() / ".netrc"
    return bool(os.environ.get("SWANLAB_API_KEY")) or login.is_file()
