"""Estimators that sum the rewards from each token on, whatever the token's group."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    masked_whiten,
)


@torch.no_grad()
def gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``.

    Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16). A
    position outside the mask (an observation of a tool) is skipped: V and A of the next masked
    position are carried past it. Returns are ``A + V`` with A before whitening; the advantages are
    whitened over the whole batch, positions outside the mask are not set to 0. Needs `values`.

    Raises:
        ValueError: the batch has fewer than two masked positions.
    """
    values = inputs.required("values", estimator="gae")
    raw = torch.empty_like(inputs.rewards)
    next_value = torch.zeros_like(inputs.rewards[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(raw.shape[1])):
        delta = inputs.rewards[:, t] + settings.gamma * next_value - values[:, t]
        advantage = delta + settings.gamma * settings.lam * next_advantage
        next_value = torch.where(inputs.mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(inputs.mask[:, t], advantage, next_advantage)
        raw[:, t] = next_advantage
    return Advantages(masked_whiten(raw, inputs.mask), raw + values)


@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """``G_t = r_t + gamma G_{t+1}``; advantages are G whitened over the batch, 0 off the mask.

    REINFORCE++ (Hu 2025, arXiv 2501.03262). A position outside the mask gets return 0, and the
    return of the next masked position is carried past it, so a response continues after a tool's
    observation. No groups.

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
def remax(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``A_t = G_t - b`` on the mask and G_t off it; returns are G, the rewards to go.

    ReMax (Li et al. 2024, arXiv 2310.10505): b is the greedy response's reward. Needs `baselines`.
    """
    baselines = inputs.required("baselines", estimator="remax")
    returns = inputs.reward_to_go()
    return Advantages(returns - inputs.on_tokens(baselines), returns)
