"""Advantages for pass@k (Tang et al. 2025, arXiv 2503.19595: leave-one-out maximum)."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.grpo import STD_EPSILON
from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
)


@torch.no_grad()
def grpo_passk(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """``(best - second best) / (std + 1e-6)`` on the best row of each group, 0 on all others.

    The std is the group's, unbiased; without `settings.norm_by_std` there is no division. Where
    two rows share the best reward all advantages are 0. Needs `group_index`.

    Raises:
        ValueError: a group has one row only.
    """
    groups = Groups.of(inputs, estimator="grpo_passk")
    if int(groups.sizes.min()) < 2:
        raise ValueError(
            "algorithm.adv_estimator: 'grpo_passk' needs groups of at least 2 rows, got one of "
            "size 1; set actor_rollout_ref.rollout.n to 2 or more"
        )
    rewards = inputs.row_rewards()
    order = torch.argsort(rewards, descending=True, stable=True)
    order = order[torch.argsort(groups.of_row[order], stable=True)]
    first = groups.sizes.cumsum(0) - groups.sizes
    best, second = order[first], order[first + 1]
    scores = torch.zeros_like(rewards)
    scores[best] = rewards[best] - rewards[second]
    if settings.norm_by_std:
        scores = scores / (groups.std(rewards) + STD_EPSILON)
    advantages = inputs.on_tokens(scores)
    return Advantages(advantages, advantages)
