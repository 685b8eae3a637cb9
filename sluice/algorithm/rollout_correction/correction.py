"""Correct one set of tokens, also inside the loss ``bypass_mode``: importance weights of the
trainer's policy against the one that sampled them, rejection where the two diverge too far, and
diagnostics.

Truncation bounds the variance of weights (TIS; Ionides 2008), a band drops implausible tokens
(IcePop).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sluice.algorithm.rollout_correction.settings import (
    RejectionRule,
    RolloutCorrectionSettings,
    WeightBounds,
)
from sluice.algorithm.rollout_correction.statistics import (
    Moments,
    Reduction,
    Statistic,
    Statistics,
    TokenRows,
)

MAX_LOG_RATIO = 20.0

NORM_FACTOR = "rollout_is_batch_norm_factor"


@dataclass(frozen=True, slots=True, eq=False)
class RolloutCorrection:
    """What to multiply losses and masks with, and what to report.

    Args:
        weights: float32 [tokens] without gradient, None without `rollout_is`. Not normalised; see
            `normalized_weights`.
        kept: bool [tokens], all True without `rollout_rs`.
        statistics: merge them over micro-batches and ranks, then `statistics.metrics_of`.
    """

    weights: torch.Tensor | None
    kept: torch.Tensor
    statistics: Statistics


@torch.no_grad()
def rollout_correction(
    logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    row_index: torch.Tensor,
    settings: RolloutCorrectionSettings,
) -> RolloutCorrection:
    """Compare a policy of the trainer with the one that sampled the tokens.

    Args:
        logprobs: float [tokens]; the old policy's, or in bypass mode the current one's.
        behavior_logprobs: float [tokens], of the distribution that sampled each token.
        row_index: int64 [tokens]; all tokens of a row are in the same call.
    """
    policy, behavior = logprobs.detach().float(), behavior_logprobs.detach().float()
    log_ratio, rows = policy - behavior, TokenRows.of(row_index)
    statistics: dict[str, Statistic] = {}
    weights: torch.Tensor | None = None
    keep_mask = torch.ones_like(log_ratio, dtype=torch.bool)
    if settings.rollout_is is not None:
        of_tokens = settings.rollout_is == "token"
        weights, statistics = _importance_weights(
            log_ratio, rows, settings.bounds(), of_tokens=of_tokens
        )
        if settings.rollout_is_batch_normalize:
            averaged = weights if of_tokens else rows.mean(weights)
            statistics[NORM_FACTOR] = Statistic(Moments.of(averaged), Reduction.NORMALIZER)
    rules = settings.rules()
    if rules:
        keep_mask, rejections = _reject(log_ratio, rows, rules)
        statistics |= rejections
    statistics |= _off_policy_statistics(policy, behavior, rows)
    return RolloutCorrection(weights, keep_mask, statistics)


def _off_policy_statistics(
    old_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, rows: TokenRows
) -> dict[str, Statistic]:
    """Return statistics of a batch, taken in float64.

    With x the difference old - behavior of a token: ``kl`` is the token mean of -x, ``k3_kl`` of
    exp(x) - x - 1, ``chi2_token`` of exp(2 x) - 1 with x within +-20, ``chi2_seq`` the row mean of
    the same of the row's sum of x. Perplexities are exp(-mean logprob) of each row, averaged over
    rows; ``log_ppl_diff`` is the trainer's log perplexity less the engine's, ``ppl_ratio`` its
    exponential.

    Args:
        old_logprobs: float [tokens], of the trainer.
        behavior_logprobs: float [tokens], of the engine.
    """
    rows = rows.on_cpu()
    old, behavior = old_logprobs.cpu().double(), behavior_logprobs.cpu().double()
    x, training, rollout = old - behavior, -rows.mean(old), -rows.mean(behavior)
    gap = Moments.of(training - rollout)
    means = {
        "training_ppl": training.exp(),
        "training_log_ppl": training,
        "rollout_ppl": rollout.exp(),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": training - rollout,
        "log_ppl_abs_diff": (training - rollout).abs(),
        "ppl_ratio": (training - rollout).exp(),
        "kl": -x,
        "k3_kl": x.expm1() - x,
        "chi2_token": _squared_ratio(x) - 1.0,
        "chi2_seq": _squared_ratio(rows.sum(x)) - 1.0,
    }
    return {
        **{name: Statistic(Moments.of(values), Reduction.MEAN) for name, values in means.items()},
        "log_ppl_diff_max": Statistic(gap, Reduction.MAX),
        "log_ppl_diff_min": Statistic(gap, Reduction.MIN),
    }


def _squared_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return (2.0 * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()


def _importance_weights(
    log_ratio: torch.Tensor, rows: TokenRows, bounds: WeightBounds, *, of_tokens: bool
) -> tuple[torch.Tensor, dict[str, Statistic]]:
    """Return ``exp`` of the log ratio within +-20, of each token or of the sum over its row.

    Args:
        log_ratio: float32 [tokens], trainer's logprob less the engine's.
        of_tokens: else all tokens of a row have one weight.

    Returns:
        float32 [tokens], bounded, not normalised; and the statistics of ``rollout_is_*``.
    """
    exponent = log_ratio if of_tokens else rows.sum(log_ratio)[rows.of_token]
    raw = exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if bounds.lower is None:
        weights = raw.clamp(max=bounds.upper)
    else:
        is_inside = (raw >= bounds.lower) & (raw <= bounds.upper)
        weights = torch.where(is_inside, raw, torch.zeros_like(raw))
    statistics = {
        **_token_statistics(raw, weights, bounds),
        **_row_statistics(rows.mean(raw), rows.mean(weights), bounds),
    }
    if not of_tokens:
        statistics |= _ratio_statistics(rows.sum(log_ratio), bounds)
    return weights, statistics


def _lower(bounds: WeightBounds) -> float:
    return 1.0 / bounds.upper if bounds.lower is None else bounds.lower


def _spread(name: str, moments: Moments, deviation: Reduction) -> dict[str, Statistic]:
    readings = {
        "mean": Reduction.MEAN,
        "std": deviation,
        "max": Reduction.MAX,
        "min": Reduction.MIN,
    }
    return {f"{name}_{kind}": Statistic(moments, reading) for kind, reading in readings.items()}


def _fractions(name: str, values: torch.Tensor, low: float, high: float) -> dict[str, Statistic]:
    """Return the shares of values above and below bounds."""
    return {
        f"{name}_fraction_high": Statistic(Moments.of(values > high), Reduction.MEAN),
        f"{name}_fraction_low": Statistic(Moments.of(values < low), Reduction.MEAN),
    }


def _token_statistics(
    raw: torch.Tensor, weights: torch.Tensor, bounds: WeightBounds
) -> dict[str, Statistic]:
    applied, low, high = Moments.of(weights), _lower(bounds), bounds.upper
    statistics = {
        **_spread("rollout_is", applied, Reduction.STD),
        "rollout_is_eff_sample_size": Statistic(applied, Reduction.EFFECTIVE_FRACTION),
        **_fractions("rollout_is_ratio", raw, low, high),
    }
    if bounds.lower is not None:
        outside_moments = Moments.of((raw > high) | (raw < low))
        statistics["rollout_is_oob_ratio"] = Statistic(outside_moments, Reduction.MEAN)
    return statistics


def _row_statistics(
    raw: torch.Tensor, weights: torch.Tensor, bounds: WeightBounds
) -> dict[str, Statistic]:
    """Return statistics of the mean weights of rows [rows], before and after the bounds."""
    name, deviations = "rollout_is_seq", Moments.of((weights - 1.0).abs())
    return {
        **_spread(name, Moments.of(weights), Reduction.SAMPLE_STD),
        f"{name}_max_deviation": Statistic(deviations, Reduction.MAX),
        **_fractions(name, raw, _lower(bounds), bounds.upper),
    }


def _ratio_statistics(log_ratio_sums: torch.Tensor, bounds: WeightBounds) -> dict[str, Statistic]:
    """Return what a sequence's weights report of their ratios [rows] before any bound."""
    sums = log_ratio_sums.cpu().double()
    ratios = Moments.of(sums.clamp(max=MAX_LOG_RATIO).exp())
    low, high = math.log(_lower(bounds)), math.log(bounds.upper)
    return {
        "rollout_is_max": Statistic(ratios, Reduction.MAX),
        "rollout_is_min": Statistic(ratios, Reduction.MIN),
        **_fractions("rollout_is_ratio", sums, low, high),
    }


def _reject(
    log_ratio: torch.Tensor, rows: TokenRows, rules: Sequence[RejectionRule]
) -> tuple[torch.Tensor, dict[str, Statistic]]:
    """Keep the tokens that pass all rules; a rule over rows keeps or drops whole rows.

    With x the log ratio (trainer's less the engine's logprob) within +-20: k1 = -x, k2 = x^2 / 2,
    k3 = exp(x) - 1 - x, of a token, or their sum, mean or maximum over the row.

    Returns:
        bool [tokens], true where the token stays; and the statistics of ``rollout_rs_*``.
    """
    keep_mask = torch.ones_like(log_ratio, dtype=torch.bool)
    statistics: dict[str, Statistic] = {}
    for rule in rules:
        of_tokens = _divergence(log_ratio, rule.estimator)
        of_rows = _row_divergence(of_tokens, rows, rule.scope)
        if rule.scope != "token":
            of_tokens = of_rows[rows.of_token]
        passed = (of_tokens >= rule.lower) & (of_tokens <= rule.upper)
        keep_mask &= passed
        statistics |= _rule_statistics(rule, of_tokens, of_rows)
        statistics |= _masked_shares(f"rollout_rs_{rule.option}", passed, rows)
    return keep_mask, {**statistics, **_masked_shares("rollout_rs", keep_mask, rows)}


def _divergence(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    x = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -x
    return 0.5 * x.square() if estimator == "k2" else x.expm1() - x


def _row_divergence(values: torch.Tensor, rows: TokenRows, scope: str) -> torch.Tensor:
    if scope == "seq_sum":
        return rows.sum(values)
    return rows.max(values) if scope == "seq_max" else rows.mean(values)


def _rule_statistics(
    rule: RejectionRule, of_tokens: torch.Tensor, of_rows: torch.Tensor
) -> dict[str, Statistic]:
    name, of_row = f"rollout_rs_{rule.option}", Moments.of(of_rows)
    judged = of_tokens if rule.scope == "token" else of_rows
    extremes = Moments.of(judged)
    # k2 and k3 are never negative: without a lower bound the clamp starts at 0.
    lowest = 0.0 if rule.lower == -torch.inf else rule.lower
    clamped = Moments.of(of_tokens.clamp(lowest, rule.upper))
    of_bounds = _fractions(f"{name}_seq", of_rows, rule.lower, rule.upper)
    if rule.lower == -torch.inf:  # as in verl, where only this share is left out then
        del of_bounds[f"{name}_seq_fraction_low"]
    return {
        f"{name}_mean": Statistic(Moments.of(of_tokens), Reduction.MEAN),
        f"{name}_max": Statistic(extremes, Reduction.MAX),
        f"{name}_min": Statistic(extremes, Reduction.MIN),
        f"{name}_std": Statistic(clamped, Reduction.STD),
        **_fractions(name, judged, rule.lower, rule.upper),
        **_spread(f"{name}_seq", of_row, Reduction.SAMPLE_STD),
        f"{name}_seq_max_deviation": Statistic(Moments.of(of_rows.abs()), Reduction.MAX),
        **of_bounds,
    }


def _masked_shares(prefix: str, keep_mask: torch.Tensor, rows: TokenRows) -> dict[str, Statistic]:
    """Return the share of tokens dropped, and of rows that lost a token."""
    return {
        f"{prefix}_masked_fraction": Statistic(Moments.of(~keep_mask), Reduction.MEAN),
        f"{prefix}_seq_masked_fraction": Statistic(
            Moments.of(rows.any(~keep_mask)), Reduction.MEAN
        ),
    }


def normalized_weights(weights: torch.Tensor, batch_statistics: Statistics) -> torch.Tensor:
    """Scale the weights to mean 1 over the batch if `rollout_is_batch_normalize` is set.

    Args:
        weights: of a `RolloutCorrection`, [tokens].
        batch_statistics: merged over all of the batch's parts.
    """
    factor = batch_statistics.get(NORM_FACTOR, Statistic(Moments(), Reduction.NORMALIZER))
    if not factor.moments.count:
        return weights
    return weights / factor.moments.read(Reduction.NORMALIZER)
