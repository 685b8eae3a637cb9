"""Tells checkpoints that a run has written from those that were there before it."""

from __future__ import annotations

from pathlib import Path

# How the checkpoints stood when the run began, for the trainer.
MARK_VARIABLE = "SLUICE_CHECKPOINTS_BEFORE"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
_NONE = "none"


def checkpoint_mark(folder: Path) -> str:
    """A text that differs after each checkpoint saved to `folder`.

    The file that names the newest checkpoint is replaced whenever one is complete, and by nothing
    else, so its identity on disk is enough.
    """
    try:
        found = (folder / TRACKER_NAME).stat()
    except OSError:
        return _NONE
    return f"{found.st_ino}-{found.st_mtime_ns}"
