"""Common parts of losses: importance ratio, aggregation (loss_agg_mode), result, and the total with
the entropy bonus and the divergence from the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, MetricMean
from sluice.algorithm.losses.settings import PolicyLossSettings
from sluice.algorithm.rollout_correction.statistics import Statistics

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within +- this where a loss needs it; float32 stays finite."""


class LossAggregation(StrEnum):
    """How tokens and rows are weighted against each other."""

    TOKEN_MEAN = "token-mean"
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"


def aggregate(
    loss: torch.Tensor,
    row_index: torch.Tensor,
    counts: GlobalCounts,
    mode: str,
    loss_scale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this micro-batch's share of the mini-batch's loss.

    With sums over the given tokens, T and S the tokens and rows of `counts`, and length(row) the
    number of tokens of a row: ``token-mean`` sum / T (DAPO §3.3); ``token-sum`` sum;
    ``seq-mean-token-sum`` sum / S; ``seq-mean-token-sum-norm`` sum / S / `loss_scale_factor`
    (Dr.GRPO); ``seq-mean-token-mean`` sum(loss / length(row)) / S (GRPO). Rows without tokens add
    nothing but count in S.

    Args:
        loss: float [tokens].
        row_index: int64 [tokens], values >= 0; all tokens of a row are in the same call.
        mode: a `LossAggregation`.
        loss_scale_factor: divisor of ``seq-mean-token-sum-norm``, by verl's default the response
            limit in tokens.

    Returns:
        scalar (0-d) in float32, or float64 for such a loss; 0 for no tokens.
    """
    values = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if mode == LossAggregation.SEQ_MEAN_TOKEN_MEAN:
        values = values / torch.bincount(row_index)[row_index]
    divisors = {
        LossAggregation.TOKEN_MEAN: counts.tokens,
        LossAggregation.TOKEN_SUM: 1.0,
        LossAggregation.SEQ_MEAN_TOKEN_SUM: counts.rows,
        LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM: counts.rows * loss_scale_factor,
        LossAggregation.SEQ_MEAN_TOKEN_MEAN: counts.rows,
    }
    return values.sum() / divisors[LossAggregation(mode)]


def bounded_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """``logprobs - old_logprobs`` within +-`MAX_LOG_RATIO`, beyond which no gradient flows."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def surrogate_terms(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: PolicyLossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-A r`` and ``-A clip(r, 1 - low, 1 + high)``; PPO's loss is their maximum.

    Schulman et al. 2017, equation 7, with the decoupled bounds of DAPO §3.1. All tensors have the
    same shape.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return unclipped, clipped


@dataclass(frozen=True, slots=True, eq=False)
class PolicyObjective:
    """This micro-batch's share of the mini-batch's loss (0-d, to differentiate) and metrics.

    `statistics` are those of a rollout correction within the loss.
    """

    loss: torch.Tensor
    metrics: Mapping[str, MetricMean]
    statistics: Statistics = field(default_factory=dict)


ObjectiveFunction = Callable[[LossInputs, GlobalCounts, PolicyLossSettings], PolicyObjective]
"""Returns the share of these tokens in the loss of a mini-batch with these counts."""


def token_metric(values: torch.Tensor) -> MetricMean:
    """Return the mean of `values` [N], a number or a condition of each token."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return MetricMean(values.detach().sum(dtype=dtype), values.numel())


def token_objective(
    token_loss: torch.Tensor,
    inputs: LossInputs,
    counts: GlobalCounts,
    settings: PolicyLossSettings,
    metrics: Mapping[str, MetricMean],
    *,
    mode: str | None = None,
) -> PolicyObjective:
    """Weigh per-token losses [N] with the importance weights, if any, and aggregate them.

    `mode` overrides ``settings.loss_agg_mode`` for losses that are defined over sequences.
    """
    if inputs.rollout_weights is not None:
        token_loss = token_loss * inputs.rollout_weights
    mode, factor = mode or settings.loss_agg_mode, settings.loss_scale_factor
    loss = aggregate(token_loss, inputs.row_index, counts, mode, factor)
    return PolicyObjective(loss, metrics)


@dataclass(frozen=True, slots=True, eq=False)
class TotalLoss:
    """0-d shares of one micro-batch; only `total` is to be differentiated.

    The others are detached and unweighted, ``None`` where the term was not given: their sums over
    micro-batches and ranks are verl's ``actor/pg_loss``, ``actor/entropy_loss`` and
    ``actor/kl_loss``.
    """

    total: torch.Tensor
    policy: torch.Tensor
    entropy: torch.Tensor | None
    kl: torch.Tensor | None


def total_loss(
    objective: PolicyObjective,
    inputs: LossInputs,
    counts: GlobalCounts,
    settings: PolicyLossSettings,
    *,
    entropy: torch.Tensor | None = None,
    entropy_coeff: float = 0.0,
    kl: torch.Tensor | None = None,
    kl_loss_coef: float = 0.0,
) -> TotalLoss:
    """``policy - entropy_coeff agg(entropy) + kl_loss_coef agg(kl)``.

    Both terms are aggregated by ``settings.loss_agg_mode``, also where the policy loss overrides
    it, and without importance weights.

    Args:
        entropy: float [N], nats; with a coefficient of 0 it is only reported.
        kl: float [N], estimated divergences from the reference policy.
    """
    total, shares = objective.loss, []
    mode, factor = settings.loss_agg_mode, settings.loss_scale_factor
    for values, weight in ((entropy, -entropy_coeff), (kl, kl_loss_coef)):
        share = None
        if values is not None:
            share = aggregate(values, inputs.row_index, counts, mode, factor)
        if share is not None and weight != 0.0:
            total = total + weight * share
        shares.append(None if share is None else share.detach())
    return TotalLoss(total, objective.loss.detach(), *shares)


@dataclass(frozen=True, slots=True, eq=False)
class ValueLoss:
    """A micro-batch's share of the critic's loss, and what its metrics are made of.

    Args:
        loss: 0-d, to differentiate; summed over micro-batches and ranks it is ``critic/vf_loss``.
        metric_sums: detached 0-d sums over tokens of ``critic/vf_clipfrac`` (tokens whose clipped
            error exceeds the other) and ``critic/vpred_mean`` (predicted values). Add them and
            `num_tokens` over micro-batches and ranks, then divide.
        num_tokens: tokens in this micro-batch.
    """

    loss: torch.Tensor
    metric_sums: Mapping[str, torch.Tensor]
    num_tokens: int


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    row_index: torch.Tensor,
    counts: GlobalCounts,
    *,
    cliprange_value: float,
    mode: str,
    loss_scale_factor: float = 1.0,
) -> ValueLoss:
    """Return half of the aggregate of ``max((v - R)^2, (clip(v, v_old +- cliprange) - R)^2)``.

    Args:
        values: float [tokens], of the critic being updated; carries the gradient.
        old_values: float [tokens], of the critic before the train batch.
        returns: float [tokens], R.
        row_index: as of `aggregate`, like the counts, the mode and the factor.
        cliprange_value: how far a value may move before its error is held, > 0.
    """
    clipped_values = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    free_error, held_error = (values - returns).square(), (clipped_values - returns).square()
    errors = torch.maximum(free_error, held_error)
    loss = 0.5 * aggregate(errors, row_index, counts, mode, loss_scale_factor)
    with torch.no_grad():
        metric_sums = {
            "critic/vf_clipfrac": (held_error > free_error).sum().float(),
            "critic/vpred_mean": values.detach().float().sum(),
        }
    return ValueLoss(loss=loss, metric_sums=metric_sums, num_tokens=values.numel())
