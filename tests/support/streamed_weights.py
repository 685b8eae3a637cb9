"""What a learner sends to its replicas."""

from __future__ import annotations

import torch

from services.trainer.learner.learner import Learner


def streamed(learner: Learner) -> dict[str, torch.Tensor]:
    """What a learner of one rank sends to replicas."""
    rows: dict[str, list[torch.Tensor]] = {}
    for name, part in learner.stream():
        rows.setdefault(name, []).append(part.clone())
    return {name: torch.cat(parts) for name, parts in rows.items()}
