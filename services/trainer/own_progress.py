"""Where a trainer begins: at what its configuration says, or at its run's own last checkpoint."""

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
    from sluice.config.trainer import TrainerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where this process begins.

    `replaces_after` is the step after which it records steps anew that a process before it, in the
    same run or in an earlier one, may have recorded; None if there was none.
    """

    checkpoint: Checkpoint | None
    replaces_after: int | None


def beginning(
    trainer: TrainerConfig,
    store: CheckpointStore,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> Beginning:
    """Chooses the checkpoint to go on from.

    ``trainer.resume_mode`` says where a run begins. A trainer that its supervisor starts again is
    in the middle of a run: it goes on from the newest checkpoint that this run has saved, also with
    ``disable`` and ``resume_path``, and if there is none yet, from where the run began.

    Args:
        trainer: the settings.
        store: the checkpoints of `folder`.
        folder: where checkpoints are.
        environment: what the launcher has set.

    Raises:
        ConfigError, CheckpointError: as `resume_point` and `CheckpointStore.latest`.
    """
    times = restarts(environment)
    if times == 0:
        found = resume_point(trainer, store)
        return Beginning(found, found.step if found else None)
    has_saved = checkpoint_mark(folder) != environment.get(MARK_VARIABLE)
    found = store.latest() if has_saved else resume_point(trainer, store)
    step = found.step if found else 0
    logger.warning(
        "started again (%d times so far): the run goes on from step %d, %s",
        times,
        step,
        "its last checkpoint" if has_saved else "where it began, since it has saved none",
    )
    return Beginning(found, step)
