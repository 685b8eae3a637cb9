"""Policy gradients masked by how far a token's probability moved (``dppo_tv``, ``dppo_kl``)."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import (
    PolicyObjective,
    bounded_log_ratio,
    token_metric,
    token_objective,
)
from sluice.algorithm.losses.settings import PolicyLossSettings

LOG_GUARD = 1e-8


def dppo_tv_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-A min(r, c) log p`` where the probability moved by no more than the bounds.

    DPPO with binary total variation (arXiv 2602.04879): a token counts if ``p - p_old <= high``
    (A > 0) or ``p - p_old >= -low`` (A <= 0). The truncated ratio and the choice carry no
    gradient; `clip_low` and `clip_high` bound probabilities here, not ratios.
    """
    with torch.no_grad():
        moved = inputs.logprobs.exp() - inputs.old_logprobs.exp()
        valid = torch.where(
            inputs.advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low
        )
    return _masked_objective(valid, inputs, counts, settings)


def dppo_kl_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """`dppo_tv_objective` with the divergence of a token against all others as the distance.

    KL of Bernoulli(p_old) from Bernoulli(p): ``p_old (log p_old - log p) + (1 - p_old)
    log((1 - p_old + 1e-8) / (1 - p + 1e-8))``. With A > 0 a token counts if that is at most `high`
    or p <= p_old; else if it is at most `low` or p >= p_old (arXiv 2602.04879).
    """
    with torch.no_grad():
        p, old = inputs.logprobs.exp(), inputs.old_logprobs.exp()
        others = ((1.0 - old + LOG_GUARD) / (1.0 - p + LOG_GUARD)).log()
        divergence = old * (inputs.old_logprobs - inputs.logprobs) + (1.0 - old) * others
        valid = torch.where(
            inputs.advantages > 0,
            (divergence <= settings.clip_high) | (p <= old),
            (divergence <= settings.clip_low) | (p >= old),
        )
    return _masked_objective(valid, inputs, counts, settings)


def _masked_objective(
    valid: torch.Tensor, inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    with torch.no_grad():
        log_ratio = bounded_log_ratio(inputs.logprobs, inputs.old_logprobs)
        ratio = log_ratio.exp()
        weight = -inputs.advantages * ratio.clamp(max=settings.clip_c) * valid
    metrics = {
        "actor/pg_clipfrac": token_metric(~valid),
        "actor/pg_clipfrac_lower": token_metric((ratio > settings.clip_c) & valid),
        "actor/ppo_kl": token_metric(-log_ratio),
    }
    return token_objective(weight * inputs.logprobs, inputs, counts, settings, metrics)
