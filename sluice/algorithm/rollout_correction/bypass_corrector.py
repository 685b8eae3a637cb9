"""Rollout correction inside the loss, for the policy loss ``bypass_mode``."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.inputs import Correction, Corrector, MetricMean
from sluice.algorithm.rollout_correction.correction import normalized_weights, rollout_correction
from sluice.algorithm.rollout_correction.plan import RolloutCorrectionSettings
from sluice.algorithm.rollout_correction.statistics import Reading, Statistic


def bypass_corrector(settings: RolloutCorrectionSettings) -> Corrector:
    """A corrector of one micro-batch at a time.

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
