"""The checkpoint with which rank 0 starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.trainer.learner.checkpoint import resume_point
from sluice.service_contract import MARK_VARIABLE, checkpoint_mark, restarts

if TYPE_CHECKING:
    from services.trainer.learner.checkpoint import Checkpoint, CheckpointStore
    from sluice.config.schema.trainer import TrainerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The point where this process continues the run.

    `checkpoint` is None at step 0. `replaces_after` is the last step whose metrics stay: an earlier
    process may have recorded later steps, which this one records again. None: there was no earlier
    process.
    """

    checkpoint: Checkpoint | None
    replaces_after: int | None


def start_point(
    trainer: TrainerConfig,
    store: CheckpointStore,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> StartPoint:
    """Choose the checkpoint to continue from.

    ``trainer.resume_mode`` decides where a run begins. A trainer that its supervisor restarts is in
    the middle of a run: it continues from the newest checkpoint of this run, also with ``disable``
    and ``resume_path``. If the run has saved none yet, it starts where the run began.

    Args:
        trainer: the settings.
        store: the checkpoints of `folder`.
        folder: holds the checkpoints.
        environment: variables from the launcher.

    Raises:
        ConfigError, CheckpointError: as `resume_point` and `CheckpointStore.latest`.
    """
    times = restarts(environment)
    if times == 0:
        found = resume_point(trainer, store)
        return StartPoint(found, found.step if found else None)
    has_saved = checkpoint_mark(folder) != environment.get(MARK_VARIABLE)
    found = store.latest() if has_saved else resume_point(trainer, store)
    step = found.step if found else 0
    logger.warning(
        "restarted (%d times so far): the run continues from step %d, %s",
        times,
        step,
        "its last checkpoint" if has_saved else "where it began, since it has saved none",
    )
    return StartPoint(found, step)
