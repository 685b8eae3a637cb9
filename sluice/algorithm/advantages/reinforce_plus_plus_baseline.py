"""REINFORCE++ with the group's mean as baseline (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.groups import Groups
from sluice.algorithm.advantages.grpo import centred_or_raw
from sluice.algorithm.advantages.inputs import AdvantageInputs, Advantages, AdvantageSettings
from sluice.algorithm.masked import masked_whiten


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
