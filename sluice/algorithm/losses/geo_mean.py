"""Geometric-mean policy optimization: one ratio a response (loss_mode ``geo_mean``)."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, row_means
from sluice.algorithm.losses.objective import PolicyObjective, token_metric
from sluice.algorithm.losses.settings import PolicyLossSettings

WEIGHT_GUARD = 1e-10


def geo_mean_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-mean(A) exp(mean of the clipped log-ratios)`` of each row, summed over rows / S.

    GMPO (Zhao et al. 2025, arXiv 2507.20673): log-ratios are clipped to
    ``[-clip_low, clip_high]``, by token and only where that lowers the objective. Importance
    weights enter by their geometric mean over the row. `loss_agg_mode` has no say. verl takes the
    plain mean over a micro-batch's rows, so that its gradient grows with the number of
    micro-batches; dividing by the mini-batch's rows S gives the same for one micro-batch and does
    not depend on the cut.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    bounded = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    sign = inputs.advantages.sign()
    # The sign turns the minimum into a maximum where A < 0: both lower the objective.
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    rows = (inputs.row_index, inputs.num_rows)
    row_loss = -row_means(inputs.advantages, *rows) * row_means(pessimistic, *rows).exp()
    if inputs.rollout_weights is not None:
        log_weights = (inputs.rollout_weights + WEIGHT_GUARD).log()
        row_loss = row_loss * row_means(log_weights, *rows).exp()
    clipped = log_ratio != bounded
    metrics = {
        "actor/pg_clipfrac": token_metric(clipped & (inputs.advantages > 0)),
        "actor/pg_clipfrac_lower": token_metric(clipped & (inputs.advantages < 0)),
        "actor/ppo_kl": token_metric(-log_ratio),
    }
    return PolicyObjective(row_loss.sum() / counts.rows, metrics)
