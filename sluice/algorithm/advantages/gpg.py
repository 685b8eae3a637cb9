"""Group policy gradient (GPG, Chu et al. 2025, arXiv 2504.02546)."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.grpo import centred_or_raw
from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
)


@torch.no_grad()
def gpg(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``alpha (R - mean of the group)`` with alpha = rows / max(rows with R != 0, 1).

    The mean of a group of one is 0. Needs `group_index`.
    """
    groups = Groups.of(inputs, estimator="gpg")
    rewards = inputs.row_rewards()
    alpha = rewards.numel() / max(int(torch.count_nonzero(rewards)), 1)
    advantages = inputs.on_tokens(alpha * centred_or_raw(rewards, groups))
    return Advantages(advantages, advantages)
