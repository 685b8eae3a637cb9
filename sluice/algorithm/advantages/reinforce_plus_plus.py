"""REINFORCE++ (Hu 2025, arXiv 2501.03262), and its variant with the group's mean as baseline."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.grpo import centred_or_raw
from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
    masked_whiten,
)


@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """``G_t = r_t + gamma G_{t+1}``; advantages are G whitened over the batch, 0 off the mask.

    A position outside the mask gets return 0, and the return of the next masked position is
    carried past it, so a response continues after a tool's observation. No groups.

    Raises:
        ValueError: the batch has fewer than two masked positions.
    """
    returns = torch.zeros_like(inputs.rewards)
    carried = torch.zeros_like(inputs.rewards[:, 0])
    for t in reversed(range(returns.shape[1])):
        chosen = inputs.mask[:, t]
        carried = torch.where(chosen, inputs.rewards[:, t] + settings.gamma * carried, carried)
        returns[:, t] = carried * chosen
    return Advantages(masked_whiten(returns, inputs.mask) * inputs.mask, returns)


@torch.no_grad()
def reinforce_plus_plus_baseline(
    inputs: AdvantageInputs, _settings: AdvantageSettings
) -> Advantages:
    """``R - mean of the group`` on every token, then whitened over the batch's tokens.

    A group of one keeps R. Long rows weigh more in the whitening, since it counts tokens. Needs
    `group_index`.

    Raises:
        ValueError: the batch has fewer than two masked positions.
    """
    groups = Groups.of(inputs, estimator="reinforce_plus_plus_baseline")
    scores = inputs.on_tokens(centred_or_raw(inputs.row_rewards(), groups))
    advantages = masked_whiten(scores, inputs.mask) * inputs.mask
    return Advantages(advantages, advantages)
