"""Entropy control by token covariance (arXiv 2505.22617): loss_mode ``clip_cov`` and ``kl_cov``."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import (
    PolicyObjective,
    surrogate_terms,
    token_metric,
    token_objective,
)
from sluice.algorithm.losses.settings import PolicyLossSettings


def token_covariances(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """``(A - mean A) (log p - mean log p)`` over the given tokens, float [N], without gradient.

    Cui et al. 2025 (arXiv 2505.22617): tokens where it is large shrink the entropy.
    The means cover the micro-batch, as in verl.
    """
    logprobs = logprobs.detach()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``max(-A r, -A clip(r))``, set to 0 at random tokens of high covariance.

    Clip-Cov (Cui et al. 2025, arXiv 2505.22617). Candidates have a covariance strictly between
    `clip_cov_lb` and `clip_cov_ub` and are not clipped by the ratio; ``max(int(clip_cov_ratio N),
    1)`` of them are chosen with ``inputs.seed``. The ratio's exponent is not bounded.
    ``actor/pg_clipfrac`` counts the chosen tokens only.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    unclipped, clipped = surrogate_terms(
        log_ratio.exp(), inputs.advantages, settings.clip_low, settings.clip_high
    )
    covariances = token_covariances(inputs.logprobs, inputs.advantages)
    candidates = (
        (clipped <= unclipped)
        & (covariances > settings.clip_cov_lb)
        & (covariances < settings.clip_cov_ub)
    ).nonzero()[:, 0]
    most = max(int(settings.clip_cov_ratio * inputs.num_tokens), 1)
    sampled = candidates[_permutation(candidates.numel(), inputs.seed).to(candidates.device)[:most]]
    kept = torch.ones_like(inputs.advantages, dtype=torch.bool)
    kept[sampled] = False
    metrics = {
        "actor/pg_clipfrac": token_metric(~kept),
        "actor/ppo_kl": token_metric(-log_ratio),
    }
    loss = torch.maximum(unclipped, clipped) * kept
    return token_objective(loss, inputs, counts, settings, metrics)


def _permutation(number: int, seed: int) -> torch.Tensor:
    # Choose on the CPU, so that a seed means the same on every device.
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed))


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
