"""PPO without a few of the tokens that shrink entropy most (loss_mode ``clip_cov``)."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.clipped_surrogate import surrogate_terms
from sluice.algorithm.losses.covariance import token_covariances
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective, token_metric, token_objective
from sluice.algorithm.losses.settings import PolicyLossSettings


def clip_cov_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``max(-A r, -A clip(r))``, set to 0 at random tokens of high covariance.

    Clip-Cov (Cui et al. 2025, arXiv 2505.22617). Candidates have a covariance strictly between
    `clip_cov_lb` and `clip_cov_ub` and are not clipped by the ratio; ``max(int(clip_cov_ratio N),
    1)`` of them are drawn with ``inputs.seed``. The ratio's exponent is not bounded.
    ``actor/pg_clipfrac`` counts the drawn tokens only.
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
    # Drawn on the CPU, so that a seed means the same on every device.
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed))
