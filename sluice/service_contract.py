"""What a launcher and the services it starts agree on. Imports nothing of the project.

Health probes load this module every few seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# How often a launcher has started this process again in its run.
RESTARTS_VARIABLE = "SLUICE_RESTARTS"
# How the checkpoints stood when the run began, for the trainer.
MARK_VARIABLE = "SLUICE_CHECKPOINTS_BEFORE"
# Name of a replica's second health state: whether it has weights. The process is healthy before.
WEIGHTS_HEALTH = "sluice.rollout.Weights"
# In a run's folder: its whole configuration, which processes and commands read.
CONFIG_NAME = "config.yaml"
# There with `sluice.reward.ledger: sqlite`. A file of another format is refused: only the version
# of sluice that wrote it reads it.
LEDGER_NAME = "reward/ledger.sqlite"
LEDGER_FORMAT = 7
# There if the run was started on a Ray cluster.
ON_RAY_NAME = "on_ray"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
_NONE = "none"


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started this process again; 0 without a launcher."""
    return int(environment.get(RESTARTS_VARIABLE, "0"))


def checkpoint_mark(folder: Path) -> str:
    """Return a text that differs after each checkpoint saved to `folder`.

    A new checkpoint replaces the file that names the newest one, and nothing else replaces it, so
    its identity on disk is enough.
    """
    try:
        status = (folder / TRACKER_NAME).stat()
    except OSError:
        return _NONE
    return f"{status.st_ino}-{status.st_mtime_ns}"
