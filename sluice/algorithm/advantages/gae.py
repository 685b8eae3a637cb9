"""Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16)."""

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

    A position outside the mask (an observation of a tool) is skipped: V and A of the next masked
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
