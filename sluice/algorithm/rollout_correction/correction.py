"""Weights, rejection and diagnostics of one set of tokens together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sluice.algorithm.rollout_correction.diagnostics import off_policy_statistics
from sluice.algorithm.rollout_correction.plan import RolloutCorrectionSettings
from sluice.algorithm.rollout_correction.rejection import reject
from sluice.algorithm.rollout_correction.statistics import (
    Moments,
    Reading,
    Statistic,
    Statistics,
)
from sluice.algorithm.rollout_correction.token_rows import TokenRows
from sluice.algorithm.rollout_correction.weights import importance_weights

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
    """Compare a policy of the trainer with the one that drew the tokens.

    Args:
        logprobs: float [tokens]; the old policy's, or in bypass mode the current one's.
        behavior_logprobs: float [tokens], of the distribution each token was drawn from.
        row_index: int64 [tokens]; all tokens of a row are in the same call.
        settings: which weights and rules.
    """
    policy, behavior = logprobs.detach().float(), behavior_logprobs.detach().float()
    log_ratio, rows = policy - behavior, TokenRows.of(row_index)
    statistics: dict[str, Statistic] = {}
    weights: torch.Tensor | None = None
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    if settings.rollout_is is not None:
        found = importance_weights(
            log_ratio, rows, level=settings.rollout_is, bounds=settings.bounds()
        )
        weights = found.weights
        statistics |= found.statistics
        if settings.rollout_is_batch_normalize:
            statistics[NORM_FACTOR] = found.normalizer
    rules = settings.rules()
    if rules:
        rejection = reject(log_ratio, rows, rules)
        kept = rejection.kept
        statistics |= rejection.statistics
    statistics |= off_policy_statistics(policy, behavior, rows)
    return RolloutCorrection(weights, kept, statistics)


def normalized_weights(weights: torch.Tensor, batch_statistics: Statistics) -> torch.Tensor:
    """The weights with mean 1 over the batch, where `rollout_is_batch_normalize` asks for it.

    Args:
        weights: of a `RolloutCorrection`, [tokens].
        batch_statistics: merged over all of the batch's parts.
    """
    factor = batch_statistics.get(NORM_FACTOR, Statistic(Moments(), Reading.NORMALIZER))
    if not factor.moments.count:
        return weights
    return weights / factor.moments.read(Reading.NORMALIZER)
