"""Sink for Weights & Biases, or for its offline files."""

from __future__ import annotations

import logging
import netrc
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import wandb

from services.trainer.metrics.sinks import TABLE_COLUMNS, VALIDATION_FAILED

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import Example, SinkTarget

logger = logging.getLogger(__name__)

_REFUSED_IN_PROJECTS = re.compile(r"[/\\#?%:,\s]+")
_LONGEST_NAME = 128
_VALIDATED_STEP = "val/step"
_HOST = "https://api.wandb.ai"


class WandbSink:
    """One run in the project.

    It never prompts for a login: without ``WANDB_MODE`` and without a key, wandb writes offline
    below the run's folder, for ``wandb sync``.
    """

    def __init__(self, target: SinkTarget) -> None:
        would_ask = not os.environ.get("WANDB_MODE") and not _has_key()
        if would_ask:
            logger.info(
                "no key for wandb: it writes offline to %s; send the run with wandb sync",
                target.run_dir,
            )
        target.run_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=_REFUSED_IN_PROJECTS.sub("-", target.project)[:_LONGEST_NAME],
            name=target.experiment[:_LONGEST_NAME],
            dir=str(target.run_dir),
            mode="offline" if would_ask else None,  # None: WANDB_MODE, else online
            config=dict(target.settings),
            settings=wandb.Settings(console="off"),
        )
        self._newest = 0
        for names in ("val-core/*", "val-aux/*", "val/*"):
            self._run.define_metric(names, step_metric=_VALIDATED_STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step; several writes of one step become one row.

        wandb takes only rising steps, and a validation may end after later steps: then it goes into
        the newest row. Its curves have ``val/step`` as their axis.
        """
        row = dict(metrics)
        if VALIDATION_FAILED in row:
            row[_VALIDATED_STEP] = step
        self._log(step, row)

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Log a table ``val/generations``."""
        rows = [[step, example.prompt, example.response, example.score] for example in examples]
        table = wandb.Table(columns=list(TABLE_COLUMNS), data=rows)
        self._log(step, {"val/generations": table})

    def _log(self, step: int, row: dict[str, Any]) -> None:
        self._newest = max(self._newest, step)
        self._run.log(row, step=self._newest)

    def close(self) -> None:
        self._run.finish()


def _has_key() -> bool:
    """Return whether wandb finds a key without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", _HOST)).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
