"""From a batch's scores to what each token is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.learner.batch.tables import BatchTable
from services.trainer.learner.ranks.parallel import DataParallel
from sluice.algorithm.advantages.gdpo import gdpo_metrics
from sluice.algorithm.advantages.inputs import AdvantageInputs, AdvantageSettings
from sluice.algorithm.advantages.rewards import KlController, last_token_rewards, penalize_rewards
from sluice.algorithm.registry import batch_estimator
from sluice.config.derived import GREEDY_BASELINE_ESTIMATORS
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdvantageRules:
    """Which estimator, and whether rewards pay for divergence (`kl_kind`)."""

    estimator: str
    constants: AdvantageSettings
    kl_kind: str | None


@dataclass(frozen=True, slots=True, eq=False)
class BatchInputs:
    """What forward passes found out about a batch, [rows, W] each; ``None``: not asked."""

    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    importance_weights: Tensor | None = None
    kept: Tensor | None = None  # bool, false at rejected tokens


@dataclass(frozen=True, slots=True, eq=False)
class TokenAdvantages:
    """[rows, W] each; metrics by verl's names; `controller` is for the next batch.

    `mask` is true at the tokens that the advantages are made of.
    """

    advantages: Tensor
    returns: Tensor
    mask: Tensor
    metrics: Mapping[str, float]
    controller: KlController


def token_advantages(
    table: BatchTable,
    batch_inputs: BatchInputs,
    components: Mapping[str, Tensor],
    rules: AdvantageRules,
    controller: KlController,
) -> TokenAdvantages:
    """Rewards on the last tokens, less the divergence if asked, through the estimator.

    As in verl the divergence counts on all tokens, and rejected tokens leave the mask before the
    estimator runs (`verl/trainer/ppo/ray_trainer.py`, `fit`).

    Args:
        table: the batch.
        evidence: ``old_logprobs`` and ``ref_logprobs`` with a KL penalty; what else the estimator
            needs.
        components: reward components (gdpo).
        rules: of the run.
        controller: the weight of the penalty.

    Raises:
        ConfigError: the estimator lacks something; names it.
    """
    rewards = last_token_rewards(table.scores, table.mask)
    metrics: dict[str, float] = {}
    if rules.kl_kind is not None:
        assert batch_inputs.old_logprobs is not None
        assert batch_inputs.ref_logprobs is not None
        penalized = penalize_rewards(
            rewards,
            batch_inputs.old_logprobs,
            batch_inputs.ref_logprobs,
            table.mask,
            kind=rules.kl_kind,
            controller=controller,
        )
        rewards, controller = penalized.rewards, penalized.controller
        metrics |= penalized.metrics
    mask = _without_rejected(table.mask, batch_inputs.kept)
    inputs = AdvantageInputs(
        rewards=rewards,
        mask=mask,
        group_index=table.group_index,
        values=batch_inputs.values,
        old_logprobs=batch_inputs.old_logprobs,
        sum_pi_squared=batch_inputs.sum_pi_squared,
        importance_weights=batch_inputs.importance_weights,
        reward_components=components,
        baselines=_baselines(table, rules.estimator),
    )
    found = batch_estimator(rules.estimator)(inputs, rules.constants)
    metrics |= _metrics(rewards, found.advantages, found.returns, table.mask, mask)
    metrics |= gdpo_metrics(inputs)
    return TokenAdvantages(found.advantages, found.returns, mask, metrics, controller)


def zero_advantage_rows(advantages: Tensor, parallel: DataParallel) -> frozenset[int]:
    """Rows of the batch whose advantages [rows, W] are all 0; one that is not finite is none.

    Collective: what rank 0 finds holds, since ranks that left out other rows would train some rows
    twice and others never.
    """
    is_zero = (advantages == 0).all(-1).float().tolist()
    of_ranks = parallel.all_gather(is_zero, "agreeing on samples without an advantage")
    return frozenset(row for row, zero in enumerate(of_ranks[0]) if zero)


def _without_rejected(mask: Tensor, kept: Tensor | None) -> Tensor:
    """`mask` less the rejected tokens.

    Where fewer than two tokens are left nothing can be whitened: then it is `mask`, and since the
    loss leaves rejected tokens out, next to nothing trains.
    """
    if kept is None or int((mask & kept).sum()) < 2:
        return mask
    return mask & kept


def _baselines(table: BatchTable, estimator: str) -> Tensor | None:
    if estimator not in GREEDY_BASELINE_ESTIMATORS:
        return None
    if table.group_without_baseline is not None:
        raise ConfigError(
            f"algorithm.adv_estimator={estimator}: {table.group_without_baseline} has no "
            "baseline_reward, the reward of a greedy response; run the reward service with the "
            "same configuration, or choose another estimator"
        )
    return table.baselines


def _metrics(
    rewards: Tensor, advantages: Tensor, returns: Tensor, responses: Tensor, mask: Tensor
) -> dict[str, float]:
    """``critic/rewards`` over rows with tokens; ``critic/advantages``, ``returns`` over `mask`."""
    answered = responses.any(-1)
    found = {
        "critic/rewards": rewards.sum(-1, dtype=torch.float64)[answered],
        "critic/advantages": advantages[mask].double(),
        "critic/returns": returns[mask].double(),
    }
    return {
        f"{name}/{reading}": float(value)
        for name, values in found.items()
        if values.numel()
        for reading, value in (
            ("mean", values.mean()),
            ("max", values.max()),
            ("min", values.min()),
        )
    }
