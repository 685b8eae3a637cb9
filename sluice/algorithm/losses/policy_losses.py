"""Policy losses of the ratio of the updated policy to the old one, by token or by response, and of
the log-probability alone. A loss is named after its ``loss_mode``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, MetricMean, row_means
from sluice.algorithm.losses.objective import (
    LossAggregation,
    PolicyObjective,
    bounded_log_ratio,
    surrogate_terms,
    token_metric,
    token_objective,
)
from sluice.algorithm.losses.settings import PolicyLossSettings
from sluice.algorithm.rollout_correction.correction import normalized_weights, rollout_correction

MAX_LOG_SEQUENCE_RATIO = 10.0
_LOG_GUARD, _WEIGHT_GUARD = 1e-8, 1e-10


def _ratio_metrics(
    log_ratio: torch.Tensor,
    clipped: torch.Tensor | None = None,
    clipped_lower: torch.Tensor | None = None,
) -> Mapping[str, MetricMean]:
    """Return the shares of clipped tokens, 0 where a loss clips none, and ``old - new``."""
    no_tokens = torch.zeros_like(log_ratio)
    return {
        "actor/pg_clipfrac": token_metric(no_tokens if clipped is None else clipped),
        "actor/pg_clipfrac_lower": token_metric(
            no_tokens if clipped_lower is None else clipped_lower
        ),
        "actor/ppo_kl": token_metric(-log_ratio),
    }


def vanilla_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """`vanilla_policy_loss`, weighed and aggregated."""
    loss, metrics = vanilla_policy_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, settings
    )
    return token_objective(loss, inputs, counts, settings, metrics)


def vanilla_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    settings: PolicyLossSettings,
) -> tuple[torch.Tensor, Mapping[str, MetricMean]]:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``, for A < 0 not above ``-A c``.

    r is the ratio ``exp(logprobs - old_logprobs)``, its exponent kept within +-20 so that float32
    stays finite; all tensors are float [tokens], and only `logprobs` carries a gradient. PPO
    (Schulman et al. 2017, equation 7), clip-higher (DAPO §3.1), dual clip (Ye et al. 2020,
    equation 5). Importance weights, if any, multiply the returned loss.

    Returns:
        loss [tokens] and means of ``actor/pg_clipfrac`` (tokens whose clipped term exceeds the
        other), ``actor/pg_clipfrac_lower`` (tokens held by the dual clip) and ``actor/ppo_kl``
        (``old - new`` within +-20).
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    unclipped, clipped = surrogate_terms(log_ratio.exp(), advantages, settings)
    pessimistic = torch.maximum(unclipped, clipped)
    # For A < 0 the clip leaves -A r unbounded as r grows; the ceiling removes that gradient.
    ceiling = -advantages * settings.clip_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    clipped_lower = negative & (pessimistic > ceiling)
    return loss, _ratio_metrics(log_ratio, clipped > unclipped, clipped_lower)


def gspo_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """Return PPO's clipped terms of ``s_t = sg(s) p / sg(p)``, s the row's geometric mean ratio.

    GSPO-token (Zheng et al. 2025, arXiv 2507.18071, §4.3): the value is the sequence's, the
    gradient a token's own. ``log s_t`` is kept at or below 10; there is no dual clip. Always
    aggregated as ``seq-mean-token-mean``, whatever `loss_agg_mode` is.
    """
    log_ratio = inputs.logprobs.detach() - inputs.old_logprobs
    log_sequence = row_means(log_ratio, inputs.row_index, inputs.num_rows)[inputs.row_index]
    # 0 in value: it only gives the sequence's ratio the gradient of this token.
    zero_log_ratio = inputs.logprobs - inputs.logprobs.detach()
    ratio = (zero_log_ratio + log_sequence).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    unclipped, clipped = surrogate_terms(ratio, inputs.advantages, settings)
    return token_objective(
        torch.maximum(unclipped, clipped),
        inputs,
        counts,
        settings,
        _ratio_metrics(log_ratio, clipped > unclipped),
        mode=LossAggregation.SEQ_MEAN_TOKEN_MEAN,
    )


def sapo_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-A sigmoid(tau (r - 1)) 4 / tau``, tau = `tau_pos` where A > 0, else `tau_neg`.

    SAPO (arXiv 2511.20347), a smooth gate instead of a clip; on policy its gradient is PPO's.
    Log-ratios are kept within +-20. Always aggregated as ``seq-mean-token-mean``.
    """
    log_ratio = bounded_log_ratio(inputs.logprobs, inputs.old_logprobs)
    positive = inputs.advantages > 0
    tau = torch.full_like(inputs.advantages, settings.tau_neg)
    tau = tau.masked_fill(positive, settings.tau_pos)
    # The slope of a sigmoid is 1/4 at 0: with 4 / tau the gradient at ratio 1 is PPO's.
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    return token_objective(
        -inputs.advantages * gate,
        inputs,
        counts,
        settings,
        _ratio_metrics(log_ratio),
        mode=LossAggregation.SEQ_MEAN_TOKEN_MEAN,
    )


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
        log_weights = (inputs.rollout_weights + _WEIGHT_GUARD).log()
        row_loss = row_loss * row_means(log_weights, *rows).exp()
    clipped = log_ratio != bounded
    metrics = _ratio_metrics(
        log_ratio, clipped & (inputs.advantages > 0), clipped & (inputs.advantages < 0)
    )
    return PolicyObjective(row_loss.sum() / counts.rows, metrics)


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
    loss = -clipped * inputs.advantages * inputs.logprobs
    metrics = _ratio_metrics(log_ratio, ratio != clipped)
    return token_objective(loss, inputs, counts, settings, metrics)


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
        log_other_ratio = ((1.0 - old + _LOG_GUARD) / (1.0 - p + _LOG_GUARD)).log()
        divergence = old * (inputs.old_logprobs - inputs.logprobs) + (1.0 - old) * log_other_ratio
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
    metrics = _ratio_metrics(log_ratio, ~valid, (ratio > settings.clip_c) & valid)
    return token_objective(weight * inputs.logprobs, inputs, counts, settings, metrics)


def _covariances(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
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
    unclipped, clipped = surrogate_terms(log_ratio.exp(), inputs.advantages, settings)
    covariances = _covariances(inputs.logprobs, inputs.advantages)
    candidates = (
        (clipped <= unclipped)
        & (covariances > settings.clip_cov_lb)
        & (covariances < settings.clip_cov_ub)
    ).nonzero()[:, 0]
    max_clipped = max(int(settings.clip_cov_ratio * inputs.num_tokens), 1)
    # Choose on the CPU, so that a seed means the same on every device.
    chosen_by = torch.Generator().manual_seed(inputs.seed)
    order = torch.randperm(candidates.numel(), generator=chosen_by).to(candidates.device)
    is_kept = torch.ones_like(inputs.advantages, dtype=torch.bool)
    is_kept[candidates[order[:max_clipped]]] = False
    metrics = {
        "actor/pg_clipfrac": token_metric(~is_kept),
        "actor/ppo_kl": token_metric(-log_ratio),
    }
    loss = torch.maximum(unclipped, clipped) * is_kept
    return token_objective(loss, inputs, counts, settings, metrics)


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
        covariances = _covariances(inputs.logprobs, inputs.advantages)
        penalised[covariances.topk(min(number, inputs.num_tokens)).indices] = 1.0
    penalty = settings.ppo_kl_coef * log_ratio.abs() * penalised
    loss = -inputs.advantages * log_ratio.exp() + penalty
    metrics = {"actor/ppo_kl": token_metric(log_ratio.abs())}
    return token_objective(loss, inputs, counts, settings, metrics)


def dro_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-(A log p - beta / 2 (log p - log p_old)^2)``, DRO by token (Richemond et al. 2024).

    Needs ``settings.dro_beta``.
    """
    assert settings.dro_beta is not None
    log_ratio = inputs.logprobs - inputs.old_logprobs
    penalty = 0.5 * settings.dro_beta * log_ratio.square()
    loss = penalty - inputs.advantages * inputs.logprobs
    metrics = {"actor/ppo_kl": token_metric(-log_ratio)}
    return token_objective(loss, inputs, counts, settings, metrics)


def gpg_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-A log p``, no ratio and no metrics (GPG, Chu et al. 2025, arXiv 2504.02546)."""
    return token_objective(-inputs.advantages * inputs.logprobs, inputs, counts, settings, {})


def bypass_mode_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """Return a loss whose old policy is the engine's, corrected by ``settings.correction``.

    It saves a forward pass. ``ppo_clip``: `vanilla_objective` of p / p_rollout; its clip bounds
    that ratio already, so weights are not applied. ``reinforce``: ``-w A log p`` with w the weight
    of p / p_rollout, 1 without; `rollout_is_batch_normalize` divides by the micro-batch's mean,
    since the policy moves between micro-batches of different steps. Rejected tokens are left out;
    denominators still come from `counts`. Weights in `inputs` compare other policies and are
    ignored. verl's rollout correction, bypass mode. Needs ``inputs.rollout_logprobs``.
    """
    engine, correction = inputs.rollout_logprobs, settings.correction
    assert engine is not None
    corrected = rollout_correction(inputs.logprobs, engine, inputs.row_index, correction)
    weights, optimise = None, vanilla_objective
    if correction.loss_type == "reinforce":
        weights, optimise = corrected.weights, _reinforce
    if weights is not None:
        weights = normalized_weights(weights, corrected.statistics)
    inputs = replace(inputs, old_logprobs=engine, rollout_weights=weights).select_tokens(
        corrected.kept
    )
    objective = optimise(inputs, counts, settings)
    return replace(objective, statistics=corrected.statistics)


def _reinforce(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    metrics = {"actor/ppo_kl": token_metric(inputs.old_logprobs - inputs.logprobs)}
    loss = -inputs.advantages * inputs.logprobs
    return token_objective(loss, inputs, counts, settings, metrics)
