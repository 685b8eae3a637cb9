"""What a learner sends to its replicas."""

from __future__ import annotations

import torch

from services.trainer.learner.learner import Learner
from services.trainer.learner.policy_snapshots import policy_snapshots
from services.trainer.learner.ranks import ParallelContext


def streamed(learner: Learner) -> dict[str, torch.Tensor]:
    """What a learner of one rank sends to replicas."""
    snapshots = policy_snapshots(learner._config, learner, ParallelContext())
    snapshots.freeze(0)
    with snapshots.buffers.read() as snapshot:
        return dict(snapshot.weights.tensors)
