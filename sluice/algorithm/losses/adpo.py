"""Anchored Direct Preference Optimization over complete groups (loss_mode ``adpo``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, MetricMean, row_means, row_sums
from sluice.algorithm.losses.objective import PolicyObjective
from sluice.algorithm.losses.settings import AdpoSettings, PolicyLossSettings
from sluice.errors import ConfigError

MAX_POSITION_LOSS = 20.0
POLY_EPSILON = 1.0
# verlm's, of the temperature that follows entropy and reward.
TAU_ALPHA, TAU_BETA, TAU_RANGE = 0.2, 0.5, (0.2, 1.5)


def plackett_luce_loss(
    scores: torch.Tensor, advantages: torch.Tensor, adpo: AdpoSettings
) -> torch.Tensor:
    """Return the mean over positions of how unlikely the next best row was among those left.

    With rows by falling advantage, position k loses ``e_k = -u_k + logsumexp(u_k, u_k+1, ...)``
    (Plackett-Luce; Xia et al. 2008). Smoothing by s replaces it by ``(1 - s) e_k + s (logsumexp -
    mean)`` of the same suffix, and the poly term adds ``1 - exp(-min(e_k, 20))``.

    Args:
        scores: float [P, G], carries the gradient.
        advantages: float [P, G]; equal ones keep the order of their columns.
        adpo: leading positions that count, all G - 1 at most, and s.

    Returns:
        float [P].
    """
    order = advantages.argsort(dim=-1, descending=True, stable=True)
    backward = scores.gather(-1, order).flip(-1)
    sizes = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    # The last position has one row left to choose from, and loses nothing.
    log_partition = backward.logcumsumexp(-1).flip(-1)[:, :-1]
    uniform = log_partition - (backward.cumsum(-1) / sizes).flip(-1)[:, :-1]
    loss = log_partition - backward.flip(-1)[:, :-1]
    loss = (1.0 - adpo.label_smoothing) * loss + adpo.label_smoothing * uniform
    loss = loss + POLY_EPSILON * (1.0 - (-loss.clamp(max=MAX_POSITION_LOSS)).exp())
    return (loss[:, : adpo.top_k] if adpo.top_k > 0 else loss).mean(dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class GroupScores:
    """P prompts of G rows each. Only `anchored` carries a gradient."""

    anchored: torch.Tensor  # [P, G], bounded (l - l_old) / tau
    log_ratio: torch.Tensor  # [P, G], bounded l - l_old, detached
    advantages: torch.Tensor  # [P, G]
    tau: torch.Tensor  # 0-d


def group_scores(inputs: LossInputs, order: Sequence[int], adpo: AdpoSettings) -> GroupScores:
    """Return scores of rows, taken in `order`; consecutive runs of G rows are a prompt's.

    l is the mean over a row's tokens (`length_normalised`) or their sum, 0 without tokens.
    """
    rows, advantages = (inputs.row_index, inputs.num_rows), inputs.row_advantages
    assert advantages is not None
    reduce = row_means if adpo.length_normalised else row_sums
    new, old = reduce(inputs.logprobs, *rows), reduce(inputs.old_logprobs, *rows).detach()
    tau = torch.full_like(old.sum(), adpo.tau)
    if adpo.adaptive_tau_vocab is not None and new.numel():
        tau = adaptive_tau(new.detach(), old, advantages, adpo.tau, adpo.adaptive_tau_vocab)
    log_ratio = (new - old).clamp(-adpo.clip_log_ratio, adpo.clip_log_ratio)
    anchored = (log_ratio / tau).clamp(-adpo.clip_anchored_score, adpo.clip_anchored_score)
    row_order = torch.tensor(order, dtype=torch.int64, device=old.device)
    shape = (-1, adpo.num_generations)
    return GroupScores(
        anchored[row_order].view(shape),
        log_ratio.detach()[row_order].view(shape),
        advantages[row_order].view(shape),
        tau,
    )


def adaptive_tau(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, base: float, vocab_size: int
) -> torch.Tensor:
    """``base (1 + 0.2 h - 0.5 c s)`` within 0.2..1.5, 0-d, without gradient.

    verlm's rule, over the rows of the micro-batch: h the mean of ``-l_old / ln vocab_size``, c one
    less the same of l, both terms within 0..1; s twice the mean of the advantages scaled to 0..1,
    less 1. (The paper and verlm's first version have other rules.)

    Args:
        new: float [rows], l by row, length-normalised.
        old: float [rows], l_old.
        advantages: float [rows].
        base: tau.
        vocab_size: entropies are normalised by its logarithm.
    """
    scale = math.log(vocab_size)
    entropy = (-old / scale).clamp(0.0, 1.0).mean()
    confidence = 1.0 - (-new / scale).clamp(0.0, 1.0).mean()
    spread = (advantages.max() - advantages.min()).clamp(min=1e-6)
    signal = 2.0 * ((advantages - advantages.min()) / spread).mean() - 1.0
    factor = 1.0 + TAU_ALPHA * entropy - TAU_BETA * confidence * signal
    return (base * factor).clamp(*TAU_RANGE)


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
    """verlm's metrics; standard deviations cover the micro-batch, weighed by its rows.

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
    metrics = {name: MetricMean(values.sum(), num_groups) for name, values in by_group.items()}
    return metrics | {name: MetricMean(values.sum(), num_rows) for name, values in by_row.items()}


def _deviation(values: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation of all values, once for each of them."""
    return values.std().expand(values.shape) if values.numel() > 1 else values * 0.0


def adpo_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """Return the listwise cross entropy between rewards and anchored scores, by prompt.

    Of the G rows of a prompt with anchored scores ``u = (l - l_old) / tau`` and targets
    ``q = softmax(A / beta_reward)`` (arXiv 2510.18913, §3; the old policy is the anchor):
    ``softmax`` ``-sum q u + logsumexp(u)``, with gradient ``softmax(u) - q`` in u; ``scaled`` that
    times `grad_scale_factor`; ``plackett_luce`` `plackett_luce_loss` of the order of A. Summed over
    prompts and divided by ``counts.groups``. To it comes `logit_reg_coef` times the squared mean of
    ``logsumexp(u)`` over this micro-batch's prompts, weighed by their share.

    No ratio is clipped, and neither `loss_agg_mode` nor importance weights are used. Every row
    counts, with ``l = 0`` if it has no tokens, so they must all be in the inputs. Needs
    ``inputs.row_groups``, ``inputs.row_advantages`` and ``counts.groups``.

    Returns:
        the loss and verlm's metrics, ``adpo/...``, ``actor/ppo_kl`` (mean absolute log-ratio of
        rows, bounded) and ``actor/pg_clipfrac`` (0).

    Raises:
        ConfigError: a group is incomplete or too large.
    """
    adpo = settings.adpo
    assert counts.groups is not None
    assert inputs.row_groups is not None
    order = complete_groups(inputs.row_groups, adpo.num_generations)
    scores = group_scores(inputs, order, adpo)
    terms = _terms(scores, adpo)
    num_groups = len(order) // adpo.num_generations
    regulariser = _regulariser(terms.log_partition, adpo)
    loss = (terms.group_losses.sum() + num_groups * regulariser) / counts.groups
    return PolicyObjective(loss, adpo_metrics(scores, terms, regulariser))


def complete_groups(row_groups: Sequence[int], num_generations: int) -> list[int]:
    """Return rows ordered so that each group's G are a run; groups come by their first row.

    Raises:
        ConfigError: a group has not exactly `num_generations` rows.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(row_groups):
        members.setdefault(group, []).append(row)
    for group, rows in members.items():
        if len(rows) != num_generations:
            raise ConfigError(
                f"ADPO: prompt {group} has {len(rows)} rows in a micro-batch instead of "
                f"algorithm.num_generations={num_generations}; set that to rollout.n and keep the "
                "rows of a prompt in one micro-batch"
            )
    return [row for rows in members.values() for row in rows]


def _terms(scores: GroupScores, adpo: AdpoSettings) -> AdpoTerms:
    if adpo.variant == "plackett_luce":
        losses = plackett_luce_loss(scores.anchored, scores.advantages, adpo)
        zeros = torch.zeros_like(losses).detach()
        return AdpoTerms(losses, zeros, zeros, scores.anchored.logsumexp(-1), zeros)
    targets = torch.softmax(scores.advantages / adpo.beta_reward, dim=-1)
    u = scores.anchored
    center = (targets * u).sum(-1).detach() if adpo.center else torch.zeros_like(u[:, 0]).detach()
    u = u - center[:, None]
    alignment, log_partition = (targets * u).sum(-1), u.logsumexp(-1)
    factor = adpo.grad_scale_factor if adpo.variant == "scaled" else 1.0
    return AdpoTerms(
        factor * (log_partition - alignment),
        alignment.detach(),
        log_partition.detach().exp() / adpo.num_generations,
        log_partition,
        center,
    )


def _regulariser(log_partition: torch.Tensor, adpo: AdpoSettings) -> torch.Tensor:
    if adpo.logit_reg_coef == 0.0 or not log_partition.numel():
        return torch.zeros((), dtype=log_partition.dtype, device=log_partition.device)
    return adpo.logit_reg_coef * log_partition.mean().square()
