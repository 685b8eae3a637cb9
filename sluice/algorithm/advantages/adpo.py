"""Advantages of anchored direct preference optimisation (ADPO, arXiv 2510.18913)."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
)

STD_FLOOR = 1e-5


@torch.no_grad()
def adpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Z-score of the reward in its group: ``(R - mean) / max(std, 1e-5)``, std unbiased.

    R sums the rewards on the mask only. Without `settings.scale_rewards` there is no division. A
    group of one gets 0: a ranking of one candidate prefers nothing. Returns are R on the mask.
    The ADPO loss reads one number a row, here on all of its tokens. Needs `group_index`.
    """
    groups = Groups.of(inputs, estimator="adpo")
    masked = torch.where(inputs.mask, inputs.rewards, torch.zeros_like(inputs.rewards))
    rewards = masked.sum(-1, dtype=torch.float64)
    scores = groups.centred(rewards)
    if settings.scale_rewards:
        scores = scores / groups.std(rewards).clamp(min=STD_FLOOR)
    return Advantages(inputs.on_tokens(scores), inputs.on_tokens(rewards))
