"""Anchored Direct Preference Optimization over complete groups (loss_mode ``adpo``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sluice.algorithm.losses.adpo_metrics import AdpoTerms, adpo_metrics
from sluice.algorithm.losses.adpo_scores import GroupScores, group_scores
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective
from sluice.algorithm.losses.plackett_luce import plackett_luce_loss
from sluice.algorithm.losses.settings import AdpoSettings, PolicyLossSettings
from sluice.errors import ConfigError


def adpo_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """Listwise cross entropy between rewards and anchored scores, by prompt.

    Of the G rows of a prompt with anchored scores ``u = (l - l_old) / tau`` and targets
    ``q = softmax(A / beta_reward)`` (arXiv 2510.18913, §3; the old policy is the anchor):
    ``softmax`` ``-sum q u + logsumexp(u)``, with gradient ``softmax(u) - q`` in u; ``scaled`` that
    times `grad_scale_factor`; ``plackett_luce`` `plackett_luce_loss` of the order of A. Summed over
    prompts and divided by ``counts.groups``. To it comes `logit_reg_coef` times the squared mean of
    ``logsumexp(u)`` over this micro-batch's prompts, weighed by their share.

    No ratio is clipped, and neither `loss_agg_mode` nor importance weights are used. Every row
    counts, with ``l = 0`` if it has no tokens, so they must all be in the inputs.

    Returns:
        the loss and verlm's metrics, ``adpo/...``, ``actor/ppo_kl`` (mean absolute log-ratio of
        rows, bounded) and ``actor/pg_clipfrac`` (0).

    Raises:
        ConfigError: groups are not given, incomplete or too large, or `counts` lacks their number.
    """
    adpo = settings.adpo
    if counts.groups is None or inputs.row_groups is None:
        raise ConfigError(
            "loss_mode=adpo compares the rows of a prompt: it needs the group of every row and "
            "the number of groups of the mini-batch"
        )
    order = complete_groups(inputs.row_groups, adpo.num_generations)
    scores = group_scores(inputs, order, adpo)
    terms = _terms(scores, adpo)
    num_groups = len(order) // adpo.num_generations
    regulariser = _regulariser(terms.log_partition, adpo)
    share = counts.averaged_ranks / counts.groups
    loss = (terms.group_losses.sum() + num_groups * regulariser) * share
    return PolicyObjective(loss, adpo_metrics(scores, terms, regulariser))


def complete_groups(row_groups: Sequence[int], num_generations: int) -> list[int]:
    """Rows ordered so that each group's G are a run; groups come by their first row.

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
        losses = plackett_luce_loss(
            scores.anchored,
            scores.advantages,
            top_k=adpo.top_k,
            label_smoothing=adpo.label_smoothing,
            poly_epsilon=adpo.poly_epsilon,
        )
        zeros = torch.zeros_like(losses).detach()
        return AdpoTerms(losses, zeros, zeros, scores.anchored.logsumexp(-1), zeros)
    targets = torch.softmax(scores.advantages / adpo.beta_reward, dim=-1)
    u = scores.general(targets, adpo)
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
