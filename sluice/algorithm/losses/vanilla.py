"""The clipped PPO loss with DAPO's decoupled bounds and the dual clip (loss_mode ``vanilla``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, MetricMean
from sluice.algorithm.losses.objective import (
    PolicyObjective,
    bounded_log_ratio,
    surrogate_terms,
    token_metric,
    token_objective,
)
from sluice.algorithm.losses.settings import PolicyLossSettings, check_clip_bounds


def vanilla_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """`vanilla_policy_loss`, weighed and aggregated."""
    loss, metrics = vanilla_policy_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        clip_c=settings.clip_c,
    )
    return token_objective(loss, inputs, counts, settings, metrics)


def vanilla_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[torch.Tensor, Mapping[str, MetricMean]]:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``, for A < 0 not above ``-A c``.

    r is the ratio ``exp(logprobs - old_logprobs)``, its exponent kept within +-20 so that float32
    stays finite. PPO (Schulman et al. 2017, equation 7), clip-higher (DAPO §3.1), dual clip (Ye et
    al. 2020, equation 5). Importance weights, if any, multiply the returned loss.

    Args:
        logprobs: float [tokens], of the policy being updated; carries the gradient.
        old_logprobs: float [tokens], of the policy before the train batch.
        advantages: float [tokens].
        clip_low: the ratio counts down to ``1 - clip_low``.
        clip_high: the ratio counts up to ``1 + clip_high``.
        clip_c: dual-clip constant, > 1.

    Returns:
        loss [tokens] and means of ``actor/pg_clipfrac`` (tokens whose clipped term exceeds the
        other), ``actor/pg_clipfrac_lower`` (tokens held by the dual clip) and ``actor/ppo_kl``
        (``old - new`` within +-20).

    Raises:
        ConfigError: ``clip_c <= 1`` or a negative clip bound.
    """
    check_clip_bounds(clip_low, clip_high, clip_c)
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    unclipped, clipped = surrogate_terms(log_ratio.exp(), advantages, clip_low, clip_high)
    pessimistic = torch.maximum(unclipped, clipped)
    # For A < 0 the clip leaves -A r unbounded as r grows; the ceiling removes that gradient.
    ceiling = -advantages * clip_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    return loss, {
        "actor/pg_clipfrac": token_metric(clipped > unclipped),
        "actor/pg_clipfrac_lower": token_metric(negative & (pessimistic > ceiling)),
        "actor/ppo_kl": token_metric(-log_ratio),
    }
