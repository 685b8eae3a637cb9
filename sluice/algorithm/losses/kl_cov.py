"""A penalty on the tokens that shrink entropy most (loss_mode ``kl_cov``)."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.covariance import token_covariances
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective, token_metric, token_objective
from sluice.algorithm.losses.settings import PolicyLossSettings


def kl_cov_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-A r``, plus ``ppo_kl_coef |log r|`` for the tokens of the highest covariance.

    KL-Cov (Cui et al. 2025, arXiv 2505.22617): the penalised tokens are the
    ``max(1, int(kl_cov_ratio N))`` of the micro-batch's N. Nothing is clipped or bounded.
    ``actor/ppo_kl`` is the mean **absolute** log-ratio.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    penalised = torch.zeros_like(inputs.advantages)
    if inputs.num_tokens:
        number = max(1, int(settings.kl_cov_ratio * inputs.num_tokens))
        covariances = token_covariances(inputs.logprobs, inputs.advantages)
        penalised[covariances.topk(min(number, inputs.num_tokens)).indices] = 1.0
    penalty = settings.ppo_kl_coef * log_ratio.abs() * penalised
    loss = -inputs.advantages * log_ratio.exp() + penalty
    metrics = {"actor/ppo_kl": token_metric(log_ratio.abs())}
    return token_objective(loss, inputs, counts, settings, metrics)
