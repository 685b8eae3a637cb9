"""Sink for SwanLab, or for its offline files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import swanlab

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import Example, SinkTarget

_REFUSED_IN_PROJECTS = re.compile(r"[^0-9a-zA-Z_\-+.]+")
_LONGEST_PROJECT = 100
_LONGEST_EXPERIMENT = 250
_LONGEST_KEY = 255


class SwanlabSink:
    """One experiment in the project, in the mode of ``SWANLAB_MODE``.

    Without that variable and without a key, SwanLab writes offline to ``<run dir>/swanlog`` (or
    ``SWANLAB_LOG_DIR``), for ``swanlab sync``. It never prompts for a login.
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
        self._run.log({_key(name): value for name, value in metrics.items()}, step=step)

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Log the texts as ``val/generations``, each with its score as caption."""
        texts = [
            swanlab.Text(f"input: {e.prompt}\n\noutput: {e.response}", caption=f"{e.score:g}")
            for e in examples
        ]
        self._run.log({"val/generations": texts}, step=step)

    def close(self) -> None:
        self._run.finish()


def _key(name: str) -> str:
    """Return a name that SwanLab accepts: no leading dot or slash, at most 255 characters."""
    return name.lstrip("./")[:_LONGEST_KEY]


def _has_key() -> bool:
    """Return whether SwanLab finds a key without asking."""
    login = Path(os.environ.get("SWANLAB_SAVE_DIR", "~/.swanlab")).expanduser() / ".netrc"
    return bool(os.environ.get("SWANLAB_API_KEY")) or login.is_file()
