"""What a learner sends to its replicas."""

from __future__ import annotations

import torch

from services.trainer.learner.frozen_weights import frozen_weights
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import DataParallel


def streamed(learner: Learner) -> dict[str, torch.Tensor]:
    """What a learner of one rank sends to replicas."""
    frozen = frozen_weights(learner._config, learner, DataParallel())
    frozen.freeze(0)
    with frozen.snapshots.read() as snapshot:
        return dict(snapshot.weights.tensors)
