"""Whether a run that begins in a folder of checkpoints has anything left to train."""

from __future__ import annotations

from pathlib import Path

from sluice.config.derived import checkpoint_folder
from sluice.config.run import RunConfig
from sluice.service_contract import TRACKER_NAME

__all__ = ["spent_notice"]


def spent_notice(config: RunConfig) -> str | None:
    """What to say before a run that goes on from a checkpoint of its last step; None otherwise.

    Nothing is said where the number of steps follows from the data only
    (``trainer.total_training_steps`` is null).
    """
    planned, done = config.trainer.total_training_steps, _newest_step(config)
    if config.trainer.resume_mode != "auto" or planned is None or done is None or done < planned:
        return None
    return (
        f"the newest checkpoint in {checkpoint_folder(config)} is of step {done}, and "
        f"trainer.total_training_steps = {planned}: the run ends without a step; raise it, or "
        "begin in a folder without checkpoints (in Compose after docker compose down -v, in Helm "
        "with another run.name)"
    )


def _newest_step(config: RunConfig) -> int | None:
    try:
        text = (Path(checkpoint_folder(config)) / TRACKER_NAME).read_text(encoding="utf-8")
        return int(text)
    except (OSError, ValueError):
        return None  # The trainer tells what is wrong with it.
