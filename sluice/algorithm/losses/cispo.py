"""Clipped importance weights on the policy gradient (loss_mode ``cispo``)."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import (
    PolicyObjective,
    bounded_log_ratio,
    token_metric,
    token_objective,
    zero_metric,
)
from sluice.algorithm.losses.settings import PolicyLossSettings


def cispo_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-sg(clip(r, 1 - low, 1 + high)) A log p``: only the weight is clipped.

    CISPO (MiniMax-M1, arXiv 2506.13585, §3.1). Log-ratios are kept within +-20.
    """
    with torch.no_grad():
        log_ratio = bounded_log_ratio(inputs.logprobs, inputs.old_logprobs)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    metrics = {
        "actor/pg_clipfrac": token_metric(ratio != clipped),
        "actor/pg_clipfrac_lower": zero_metric(inputs),
        "actor/ppo_kl": token_metric(-log_ratio),
    }
    loss = -clipped * inputs.advantages * inputs.logprobs
    return token_objective(loss, inputs, counts, settings, metrics)
