"""Anchored scores of whole responses, arranged by prompt (ADPO)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sluice.algorithm.losses.inputs import LossInputs
from sluice.algorithm.losses.row_reduction import row_means, row_sums
from sluice.algorithm.losses.settings import AdaptiveTauSettings, AdpoSettings


@dataclass(frozen=True, slots=True, eq=False)
class GroupScores:
    """P prompts of G rows each. Only `anchored` carries a gradient."""

    anchored: torch.Tensor  # [P, G], bounded (l - l_old) / tau
    log_ratio: torch.Tensor  # [P, G], bounded l - l_old, detached
    old: torch.Tensor  # [P, G], l_old
    advantages: torch.Tensor  # [P, G]
    tau: torch.Tensor  # 0-d

    def general(self, targets: torch.Tensor, adpo: AdpoSettings) -> torch.Tensor:
        """``(l - A l_old - B q - C) / tau`` [P, G], with l restored from the bounded scores."""
        removed = (
            (adpo.anchor_coef - 1.0) * self.old + adpo.target_coef * targets + adpo.constant_coef
        )
        return self.anchored - removed / self.tau


def group_scores(inputs: LossInputs, order: Sequence[int], adpo: AdpoSettings) -> GroupScores:
    """Scores of rows, taken in `order`; consecutive runs of G rows are a prompt's.

    l is the mean over a row's tokens (`length_normalised`) or their sum, 0 without tokens. A row's
    advantage is ``inputs.row_advantages`` or the mean over its tokens.
    """
    rows = (inputs.row_index, inputs.num_rows)
    reduce = row_means if adpo.length_normalised else row_sums
    new, old = reduce(inputs.logprobs, *rows), reduce(inputs.old_logprobs, *rows).detach()
    advantages = inputs.row_advantages
    if advantages is None:
        advantages = row_means(inputs.advantages, *rows)
    tau = torch.full_like(old.sum(), adpo.tau)
    if adpo.adaptive_tau is not None:
        tau = adaptive_tau(new.detach(), old, advantages, adpo.tau, adpo.adaptive_tau)
    log_ratio = _bounded(new - old, adpo.clip_log_ratio)
    anchored = _bounded(log_ratio / tau, adpo.clip_anchored_score)
    taken = torch.tensor(order, dtype=torch.int64, device=old.device)
    shape = (-1, adpo.num_generations)
    return GroupScores(
        anchored[taken].view(shape),
        log_ratio.detach()[taken].view(shape),
        old[taken].view(shape),
        advantages[taken].view(shape),
        tau,
    )


def adaptive_tau(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    base: float,
    settings: AdaptiveTauSettings,
) -> torch.Tensor:
    """``clamp(base (1 + alpha h - beta c s), minimum, maximum)``, 0-d, without gradient.

    verlm's rule, over the rows of the micro-batch: h the mean of ``-l_old / ln vocab_size``, c one
    less the same of l, both terms within 0..1; s twice the mean of the advantages scaled to 0..1,
    less 1. (The paper and verlm's first version have other rules.)

    Args:
        new: float [rows], l by row, length-normalised.
        old: float [rows], l_old.
        advantages: float [rows].
        base: tau.
        settings: the rest.
    """
    if not new.numel():
        return torch.full((), base, dtype=new.dtype, device=new.device)
    scale = math.log(settings.vocab_size)
    entropy = (-old / scale).clamp(0.0, 1.0).mean()
    confidence = 1.0 - (-new / scale).clamp(0.0, 1.0).mean()
    spread = (advantages.max() - advantages.min()).clamp(min=1e-6)
    signal = 2.0 * ((advantages - advantages.min()) / spread).mean() - 1.0
    factor = 1.0 + settings.alpha * entropy - settings.beta * confidence * signal
    return (base * factor).clamp(settings.minimum, settings.maximum)


def _bounded(values: torch.Tensor, bound: float) -> torch.Tensor:
    return values.clamp(-bound, bound) if bound > 0.0 else values
