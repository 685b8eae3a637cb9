"""What ADPO reports of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sluice.algorithm.losses.adpo_scores import GroupScores
from sluice.algorithm.losses.inputs import MetricMean


@dataclass(frozen=True, slots=True, eq=False)
class AdpoTerms:
    """By prompt, float [P] each; `group_losses` and `log_partition` carry gradients."""

    group_losses: torch.Tensor
    alignment: torch.Tensor  # sum q u
    partition: torch.Tensor  # mean exp(u)
    log_partition: torch.Tensor
    center: torch.Tensor


def adpo_metrics(
    scores: GroupScores, terms: AdpoTerms, regulariser: torch.Tensor
) -> Mapping[str, MetricMean]:
    """verlm's metrics; standard deviations are those of the micro-batch, weighed by its rows.

    ``adpo/effective_alpha`` is left out: it belongs to a variant that is not supported.
    """
    num_groups, num_rows = terms.group_losses.numel(), scores.anchored.numel()
    loss = terms.group_losses.detach() + regulariser.detach()
    by_group = {
        "adpo/loss": loss,
        "adpo/logit_reg_loss": regulariser.detach().expand(num_groups),
        "adpo/term_alignment": terms.alignment,
        "adpo/term_logsumexp": terms.partition,
        "adpo/u_center": terms.center,
        "adpo/effective_tau": scores.tau.expand(num_groups),
    }
    distance = scores.log_ratio.abs()
    by_row = {
        "adpo/advantage_mean": scores.advantages,
        "adpo/advantage_std": _deviation(scores.advantages),
        "adpo/anchored_score_mean": scores.anchored.detach(),
        "adpo/anchored_score_std": _deviation(scores.anchored.detach()),
        "adpo/log_ratio_mean": distance,
        "actor/ppo_kl": distance,
        "actor/pg_clipfrac": torch.zeros_like(distance),
    }
    found = {name: MetricMean(values.sum(), num_groups) for name, values in by_group.items()}
    return found | {name: MetricMean(values.sum(), num_rows) for name, values in by_row.items()}


def _deviation(values: torch.Tensor) -> torch.Tensor:
    """The unbiased standard deviation of all values, once for each of them."""
    return values.std().expand(values.shape) if values.numel() > 1 else values * 0.0
