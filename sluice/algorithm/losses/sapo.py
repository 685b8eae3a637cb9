"""Soft adaptive policy optimization: a smooth gate instead of a clip (loss_mode ``sapo``)."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import (
    LossAggregation,
    PolicyObjective,
    bounded_log_ratio,
    token_metric,
    token_objective,
    zero_metric,
)
from sluice.algorithm.losses.settings import PolicyLossSettings


def sapo_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-A sigmoid(tau (r - 1)) 4 / tau``, tau = `tau_pos` where A > 0, else `tau_neg`.

    SAPO (arXiv 2511.20347); on policy its gradient is PPO's. Log-ratios are
    kept within +-20. Always aggregated as ``seq-mean-token-mean``.
    """
    log_ratio = bounded_log_ratio(inputs.logprobs, inputs.old_logprobs)
    positive = inputs.advantages > 0
    tau = torch.full_like(inputs.advantages, settings.tau_neg)
    tau = tau.masked_fill(positive, settings.tau_pos)
    # The slope of a sigmoid is 1/4 at 0: with 4 / tau the gradient at ratio 1 is PPO's.
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    metrics = {
        "actor/pg_clipfrac": zero_metric(inputs),
        "actor/pg_clipfrac_lower": zero_metric(inputs),
        "actor/ppo_kl": token_metric(-log_ratio),
    }
    return token_objective(
        -inputs.advantages * gate,
        inputs,
        counts,
        settings,
        metrics,
        mode=LossAggregation.SEQ_MEAN_TOKEN_MEAN,
    )
