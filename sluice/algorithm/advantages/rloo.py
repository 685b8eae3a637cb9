"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, §3.3)."""

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
def rloo(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``R - mean of the group's other rewards``; a group of one keeps R. Needs `group_index`."""
    groups = Groups.of(inputs, estimator="rloo")
    advantages = inputs.on_tokens(_leave_one_out(inputs.row_rewards(), groups))
    return Advantages(advantages, advantages)


@torch.no_grad()
def rloo_vectorized(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """`rloo`, but a group of one gets 0, as in verl. Needs `group_index`."""
    groups = Groups.of(inputs, estimator="rloo_vectorized")
    scores = _leave_one_out(inputs.row_rewards(), groups)
    advantages = inputs.on_tokens(torch.where(groups.row_sizes == 1, 0.0, scores))
    return Advantages(advantages, advantages)


def _leave_one_out(rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
    # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
    n = groups.row_sizes
    return centred_or_raw(rewards, groups) * n / (n - 1).clamp(min=1)
