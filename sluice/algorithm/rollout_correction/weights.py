"""Importance weights of the trainer's policy against the one that sampled the tokens.

Truncation bounds the variance (TIS; Ionides 2008), a band drops implausible tokens (IcePop).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sluice.algorithm.rollout_correction.settings import WeightBounds, check_level
from sluice.algorithm.rollout_correction.statistics import (
    Moments,
    Reading,
    Statistic,
    Statistics,
    TokenRows,
)

MAX_LOG_WEIGHT = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeights:
    """Weights of a micro-batch or batch.

    Args:
        weights: float32 [tokens], bounded, not normalised, without gradient.
        statistics: of ``rollout_is_*``.
        normalizer: mean weight, over tokens or over rows, by level; merge it over
            micro-batches and ranks and divide the weights by its reading for
            `rollout_is_batch_normalize`.
    """

    weights: torch.Tensor
    statistics: Statistics
    normalizer: Statistic


@torch.no_grad()
def importance_weights(
    log_ratio: torch.Tensor, rows: TokenRows, *, level: str, bounds: WeightBounds
) -> ImportanceWeights:
    """``exp`` of the log ratio within +-20, of each token or of the sum over its row, bounded.

    Args:
        log_ratio: float32 [tokens], trainer's logprob less the engine's.
        rows: of the tokens.
        level: ``token``, or ``sequence`` for one weight on all tokens of a row.
        bounds: truncation or band.

    Raises:
        ConfigError: unknown level.
    """
    raw = raw_weights(log_ratio, rows, level=level)
    weights = bounded_weights(raw, bounds)
    statistics = {
        **_token_statistics(raw, weights, bounds),
        **_row_statistics(rows.mean(raw), rows.mean(weights), bounds),
    }
    if level == "sequence":
        statistics |= _ratio_statistics(rows.sum(log_ratio), bounds)
    normalized = weights if level == "token" else rows.mean(weights)
    normalizer = Statistic(Moments.of(normalized), Reading.NORMALIZER)
    return ImportanceWeights(weights, statistics, normalizer)


def raw_weights(log_ratio: torch.Tensor, rows: TokenRows, *, level: str) -> torch.Tensor:
    """Return the weights before any bound but the exponent's, [tokens].

    Raises:
        ConfigError: unknown level.
    """
    check_level(level)
    exponent = log_ratio if level == "token" else rows.sum(log_ratio)[rows.of_token]
    return exponent.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def bounded_weights(raw: torch.Tensor, bounds: WeightBounds) -> torch.Tensor:
    """Return weights of at most `bounds.upper`; with a lower bound 0 outside of the band."""
    if bounds.lower is None:
        return raw.clamp(max=bounds.upper)
    inside = (raw >= bounds.lower) & (raw <= bounds.upper)
    return torch.where(inside, raw, torch.zeros_like(raw))


def _lower(bounds: WeightBounds) -> float:
    return 1.0 / bounds.upper if bounds.lower is None else bounds.lower


def _token_statistics(
    raw: torch.Tensor, weights: torch.Tensor, bounds: WeightBounds
) -> dict[str, Statistic]:
    applied = Moments.of(weights)
    high, low = raw > bounds.upper, raw < _lower(bounds)
    found = {
        "rollout_is_mean": Statistic(applied, Reading.MEAN),
        "rollout_is_std": Statistic(applied, Reading.STD),
        "rollout_is_max": Statistic(applied, Reading.MAX),
        "rollout_is_min": Statistic(applied, Reading.MIN),
        "rollout_is_eff_sample_size": Statistic(applied, Reading.EFFECTIVE_FRACTION),
        "rollout_is_ratio_fraction_high": Statistic(Moments.of(high), Reading.MEAN),
        "rollout_is_ratio_fraction_low": Statistic(Moments.of(low), Reading.MEAN),
    }
    if bounds.lower is not None:
        found["rollout_is_oob_ratio"] = Statistic(Moments.of(high | low), Reading.MEAN)
    return found


def _row_statistics(
    raw: torch.Tensor, weights: torch.Tensor, bounds: WeightBounds
) -> dict[str, Statistic]:
    """Return statistics of the mean weights of rows [rows], before and after the bounds."""
    applied = Moments.of(weights)
    high, low = Moments.of(raw > bounds.upper), Moments.of(raw < _lower(bounds))
    return {
        "rollout_is_seq_mean": Statistic(applied, Reading.MEAN),
        "rollout_is_seq_std": Statistic(applied, Reading.SAMPLE_STD),
        "rollout_is_seq_max": Statistic(applied, Reading.MAX),
        "rollout_is_seq_min": Statistic(applied, Reading.MIN),
        "rollout_is_seq_max_deviation": Statistic(Moments.of((weights - 1.0).abs()), Reading.MAX),
        "rollout_is_seq_fraction_high": Statistic(high, Reading.MEAN),
        "rollout_is_seq_fraction_low": Statistic(low, Reading.MEAN),
    }


def _ratio_statistics(log_ratio_sums: torch.Tensor, bounds: WeightBounds) -> dict[str, Statistic]:
    """Return what a sequence's weights report of their ratios [rows] before any bound."""
    sums = log_ratio_sums.cpu().double()
    ratios = Moments.of(sums.clamp(max=MAX_LOG_WEIGHT).exp())
    high = Moments.of(sums > torch.tensor(bounds.upper, dtype=torch.float64).log())
    low = Moments.of(sums < torch.tensor(_lower(bounds), dtype=torch.float64).log())
    return {
        "rollout_is_max": Statistic(ratios, Reading.MAX),
        "rollout_is_min": Statistic(ratios, Reading.MIN),
        "rollout_is_ratio_fraction_high": Statistic(high, Reading.MEAN),
        "rollout_is_ratio_fraction_low": Statistic(low, Reading.MEAN),
    }
