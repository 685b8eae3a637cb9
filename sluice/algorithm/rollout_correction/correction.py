"""Correct one set of tokens: weights, rejection and diagnostics together, also inside the loss
``bypass_mode``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sluice.algorithm.losses.inputs import Correction, Corrector, MetricMean
from sluice.algorithm.rollout_correction.rejection import reject
from sluice.algorithm.rollout_correction.settings import RolloutCorrectionSettings
from sluice.algorithm.rollout_correction.statistics import (
    Moments,
    Reading,
    Statistic,
    Statistics,
    TokenRows,
)
from sluice.algorithm.rollout_correction.weights import importance_weights

MAX_LOG_RATIO = 20.0

NORM_FACTOR = "rollout_is_batch_norm_factor"


@torch.no_grad()
def off_policy_statistics(
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
        rows: of the tokens.
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
        **{name: Statistic(Moments.of(values), Reading.MEAN) for name, values in means.items()},
        "log_ppl_diff_max": Statistic(gap, Reading.MAX),
        "log_ppl_diff_min": Statistic(gap, Reading.MIN),
    }


def _squared_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return (2.0 * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()


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
    """Scale the weights to mean 1 over the batch if `rollout_is_batch_normalize` is set.

    Args:
        weights: of a `RolloutCorrection`, [tokens].
        batch_statistics: merged over all of the batch's parts.
    """
    factor = batch_statistics.get(NORM_FACTOR, Statistic(Moments(), Reading.NORMALIZER))
    if not factor.moments.count:
        return weights
    return weights / factor.moments.read(Reading.NORMALIZER)


def bypass_corrector(settings: RolloutCorrectionSettings) -> Corrector:
    """Return a corrector of one micro-batch at a time.

    It compares the current policy with the engine's. `rollout_is_batch_normalize` divides by the
    micro-batch's mean, since the policy moves between micro-batches of different steps. Metrics
    that are means add up exactly; of the others (extremes, standard deviations, sample size) the
    loss reports the mean over micro-batches.
    """

    def correct(
        logprobs: torch.Tensor,
        rollout_logprobs: torch.Tensor,
        row_index: torch.Tensor,
        num_rows: int,
    ) -> Correction:
        found = rollout_correction(logprobs, rollout_logprobs, row_index, settings)
        weights = found.weights
        if weights is not None:
            weights = normalized_weights(weights, found.statistics)
        metrics = {
            f"rollout_corr/{name}": _mean(one)
            for name, one in found.statistics.items()
            if one.moments.count
        }
        return Correction(weights=weights, keep=found.kept, metrics=metrics)

    return correct


def _mean(statistic: Statistic) -> MetricMean:
    if statistic.reading is Reading.MEAN:
        total, count = statistic.moments.total, int(statistic.moments.count)
    else:
        total, count = statistic.moments.read(statistic.reading), 1
    return MetricMean(torch.tensor(total, dtype=torch.float64), count)
