"""On-policy RL with the optimal reward baseline (OPO, Hao et al. 2025, arXiv 2505.23585)."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
)


@torch.no_grad()
def opo(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``R - sum(length R) / sum(length)`` over the group; a group of one keeps R.

    Lengths count masked positions; the baseline of a group without any is 0. Needs `group_index`.
    """
    groups = Groups.of(inputs, estimator="opo")
    rewards, lengths = inputs.row_rewards(), inputs.mask.sum(-1)
    baselines = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    advantages = inputs.on_tokens(rewards - torch.where(groups.row_sizes == 1, 0.0, baselines))
    return Advantages(advantages, advantages)
