"""ReMax (Li et al. 2024, arXiv 2310.10505): the greedy response's reward as baseline."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.inputs import AdvantageInputs, Advantages, AdvantageSettings


@torch.no_grad()
def remax(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``A_t = G_t - b`` on the mask and G_t off it; returns are G, the rewards to go.

    Needs `baselines`.
    """
    baselines = inputs.required("baselines", estimator="remax")
    returns = inputs.reward_to_go()
    return Advantages(returns - inputs.on_tokens(baselines), returns)
