"""Rejection of tokens and rows where trainer and engine diverge too far (verl's rollout_rs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sluice.algorithm.rollout_correction.settings import RejectionRule
from sluice.algorithm.rollout_correction.statistics import (
    Moments,
    Reading,
    Statistic,
    Statistics,
    TokenRows,
)

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Rejection:
    """What is left.

    Args:
        kept: bool [tokens]; multiply the response mask with it. Importance weights do not change.
        statistics: of ``rollout_rs_*``.
    """

    kept: torch.Tensor
    statistics: Statistics


@torch.no_grad()
def reject(log_ratio: torch.Tensor, rows: TokenRows, rules: Sequence[RejectionRule]) -> Rejection:
    """Keep the tokens that pass all rules; a rule over rows keeps or drops whole rows.

    With x the log ratio (trainer's less the engine's logprob) within +-20: k1 = -x, k2 = x^2 / 2,
    k3 = exp(x) - 1 - x, of a token, or their sum, mean or maximum over the row.

    Args:
        log_ratio: float32 [tokens].
        rows: of the tokens.
        rules: at least one.
    """
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    statistics: dict[str, Statistic] = {}
    for rule in rules:
        of_tokens = _divergence(log_ratio, rule.estimator)
        of_rows = _row_statistic(of_tokens, rows, rule.scope)
        if rule.scope != "token":
            of_tokens = of_rows[rows.of_token]
        passed = (of_tokens >= rule.lower) & (of_tokens <= rule.upper)
        kept &= passed
        statistics |= _rule_statistics(rule, of_tokens, of_rows)
        statistics |= _masked(f"rollout_rs_{rule.option}", passed, rows)
    return Rejection(kept, {**statistics, **_masked("rollout_rs", kept, rows)})


def _divergence(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    x = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -x
    return 0.5 * x.square() if estimator == "k2" else x.expm1() - x


def _row_statistic(values: torch.Tensor, rows: TokenRows, scope: str) -> torch.Tensor:
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
    row_high, row_low = Moments.of(of_rows > rule.upper), Moments.of(of_rows < rule.lower)
    high, low = Moments.of(judged > rule.upper), Moments.of(judged < rule.lower)
    return {
        f"{name}_mean": Statistic(Moments.of(of_tokens), Reading.MEAN),
        f"{name}_max": Statistic(extremes, Reading.MAX),
        f"{name}_min": Statistic(extremes, Reading.MIN),
        f"{name}_std": Statistic(clamped, Reading.STD),
        f"{name}_fraction_high": Statistic(high, Reading.MEAN),
        f"{name}_fraction_low": Statistic(low, Reading.MEAN),
        f"{name}_seq_mean": Statistic(of_row, Reading.MEAN),
        f"{name}_seq_std": Statistic(of_row, Reading.SAMPLE_STD),
        f"{name}_seq_max": Statistic(of_row, Reading.MAX),
        f"{name}_seq_min": Statistic(of_row, Reading.MIN),
        f"{name}_seq_max_deviation": Statistic(Moments.of(of_rows.abs()), Reading.MAX),
        f"{name}_seq_fraction_high": Statistic(row_high, Reading.MEAN),
        f"{name}_seq_fraction_low": Statistic(row_low, Reading.MEAN),
    }


def _masked(prefix: str, kept: torch.Tensor, rows: TokenRows) -> dict[str, Statistic]:
    """Return the share of tokens dropped, and of rows that lost a token."""
    return {
        f"{prefix}_masked_fraction": Statistic(Moments.of(~kept), Reading.MEAN),
        f"{prefix}_seq_masked_fraction": Statistic(Moments.of(rows.any(~kept)), Reading.MEAN),
    }
