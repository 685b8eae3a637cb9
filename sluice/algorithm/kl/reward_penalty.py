"""KL penalty in the reward (`algorithm.use_kl_in_reward`; Ouyang et al. 2022, §3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sluice.algorithm.kl.controller import KlController
from sluice.algorithm.kl.estimator import kl_estimate
from sluice.algorithm.masked import masked_mean


@dataclass(frozen=True, slots=True, eq=False)
class PenalizedRewards:
    """Rewards less the penalty, the controller for the next batch, and the metrics.

    Args:
        rewards: float [rows, width], token-level.
        controller: after this batch.
        metrics: ``actor/reward_kl_penalty``, the mean over rows of each row's token mean, and
            ``actor/reward_kl_penalty_coeff``, the coefficient that was used.
    """

    rewards: torch.Tensor
    controller: KlController
    metrics: Mapping[str, float]


@torch.no_grad()
def penalize_rewards(
    scores: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    kind: str,
    controller: KlController,
) -> PenalizedRewards:
    """``scores - coef * KL(old || ref)`` on the mask, the scores elsewhere.

    Args:
        scores: float [rows, width], token-level.
        old_logprobs: float [rows, width], of the policy before the batch.
        ref_logprobs: float [rows, width], of the reference policy.
        mask: bool [rows, width], the tokens of the responses.
        kind: name of a `kl_estimate`.
        controller: its state before the batch.

    Raises:
        ConfigError: unknown kind.
    """
    estimate = kl_estimate(old_logprobs, ref_logprobs, kind=kind)
    penalty = torch.where(mask.bool(), estimate, torch.zeros_like(estimate))
    current_kl = float(masked_mean(penalty, mask, -1).mean()) if scores.numel() else 0.0
    return PenalizedRewards(
        rewards=scores - controller.coef * penalty,
        controller=controller.after_batch(current_kl, num_rows=scores.shape[0]),
        metrics={
            "actor/reward_kl_penalty": current_kl,
            "actor/reward_kl_penalty_coeff": controller.coef,
        },
    )
