"""Advantages: from the scores of a batch to the weight of each token's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from services.trainer.learner.batch.train_batch import BatchTable, reward_components
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.update.settings import UpdateSettings
from sluice.algorithm.advantages.group_relative import gdpo_metrics
from sluice.algorithm.advantages.inputs import AdvantageInputs
from sluice.algorithm.batch_metrics import spread
from sluice.algorithm.kl import KlController, last_token_rewards, penalize_rewards
from sluice.algorithm.registry import batch_estimator
from sluice.algorithm.sources import source_metric
from sluice.types import TrainBatch

TablesT = TypeVar("TablesT", BatchTable, "PassTables")


@dataclass(frozen=True, slots=True, eq=False)
class PassTables:
    """Results of forward passes over a batch, [rows, W] each; ``None``: not needed."""

    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    importance_weights: Tensor | None = None
    kept: Tensor | None = None  # bool, false at rejected tokens


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageEstimate:
    """Advantages, returns and rewards of a batch, [rows, W] each.

    `mask` is true at the tokens that are not rejected. `metrics` have verl's names. `controller` is
    the KL controller for the next batch.
    """

    advantages: Tensor
    returns: Tensor
    rewards: Tensor
    mask: Tensor
    metrics: Mapping[str, float]
    controller: KlController


def token_advantages(
    table: BatchTable,
    passed: PassTables,
    components: Mapping[str, Tensor],
    settings: UpdateSettings,
    controller: KlController,
) -> AdvantageEstimate:
    """Put rewards on last tokens, subtract the KL penalty if configured, and run the estimator.

    As in verl, the penalty counts on all tokens, and rejected tokens leave the mask before the
    estimator runs (`verl/trainer/ppo/ray_trainer.py`, `fit`).

    Args:
        table: the batch; its rewards of turns count where the run trains on them.
        passed: ``old_logprobs`` and ``ref_logprobs`` for a KL penalty, and the other inputs of the
            estimator.

    Raises:
        ConfigError: the estimator lacks an input; names it.
    """
    turn_rewards = table.turn_rewards if settings.trains_turn_rewards else None
    rewards = last_token_rewards(table.rewards, table.mask)
    rewards = rewards if turn_rewards is None else rewards + turn_rewards
    metrics: dict[str, float] = {}
    if settings.kl_kind is not None:
        assert passed.old_logprobs is not None
        assert passed.ref_logprobs is not None
        penalized = penalize_rewards(
            rewards,
            passed.old_logprobs,
            passed.ref_logprobs,
            table.mask,
            kind=settings.kl_kind,
            controller=controller,
        )
        # An adaptive controller changes its weight after each batch.
        rewards, controller = penalized.rewards, penalized.controller
        metrics |= penalized.metrics
    mask = table.mask if passed.kept is None else table.mask & passed.kept
    inputs = AdvantageInputs(
        rewards=rewards,
        # An estimator cannot whiten fewer than two tokens; only those of `mask` are trained anyway.
        mask=mask if int(mask.sum()) >= 2 else table.mask,
        group_index=table.group_index,
        values=passed.values,
        old_logprobs=passed.old_logprobs,
        sum_pi_squared=passed.sum_pi_squared,
        importance_weights=passed.importance_weights,
        reward_components=components,
        baselines=table.baselines,
        turn_rewards=turn_rewards,
    )
    estimate = batch_estimator(settings.estimator)(inputs, settings.advantages)
    metrics |= _metrics(rewards, estimate.advantages, estimate.returns, table.mask, mask)
    if components:
        metrics |= gdpo_metrics(inputs)
    return AdvantageEstimate(
        estimate.advantages, estimate.returns, rewards, mask, metrics, controller
    )


def estimate_by_source(
    batch: TrainBatch,
    table: BatchTable,
    passed: PassTables,
    settings: UpdateSettings,
    controller: KlController,
) -> AdvantageEstimate:
    """Run the estimator of each source on its rows alone; see `token_advantages`."""
    device = table.mask.device
    of_rows = [group.source for group in batch.groups for _ in group.rollouts]
    parts: dict[str, tuple[Tensor, AdvantageEstimate]] = {}
    for source, of_source in settings.sources.items():
        rows = torch.tensor([i for i, name in enumerate(of_rows) if name == source], device=device)
        if not rows.numel():
            continue
        # Other estimators read no components, and their samples may have none.
        algorithm = of_source.config.algorithm
        keys = algorithm.gdpo_reward_keys if of_source.estimator == "gdpo" else None
        groups = tuple(group for group in batch.groups if group.source == source)
        components = reward_components(replace(batch, groups=groups), keys or (), device)
        estimate = token_advantages(
            _select_rows(table, rows), _select_rows(passed, rows), components, of_source, controller
        )
        parts[source] = rows, estimate
    return _join_sources(parts, table, controller)


def _select_rows(tables: TablesT, chosen: Tensor) -> TablesT:
    """Return the tables of some rows, int64 indexes."""
    values = {field.name: getattr(tables, field.name) for field in fields(tables)}
    return replace(tables, **{n: v[chosen] for n, v in values.items() if v is not None})


def _join_sources(
    parts: Mapping[str, tuple[Tensor, AdvantageEstimate]],
    table: BatchTable,
    controller: KlController,
) -> AdvantageEstimate:
    """Return the estimate of a whole batch from those of its sources.

    Args:
        parts: by source: its rows, int64 indexes, and its estimate.
    """

    def join(read: Callable[[AdvantageEstimate], Tensor]) -> Tensor:
        joined = torch.zeros(table.mask.shape, device=table.mask.device)
        for rows, part in parts.values():
            joined[rows] = read(part).float()
        return joined

    advantages, returns = join(lambda part: part.advantages), join(lambda part: part.returns)
    rewards, mask = join(lambda part: part.rewards), join(lambda part: part.mask) > 0
    of_sources = {
        source_metric(source, name): value
        for source, (_, part) in parts.items()
        for name, value in part.metrics.items()
    }
    metrics = _metrics(rewards, advantages, returns, table.mask, mask)
    return AdvantageEstimate(
        advantages, returns, rewards, mask, {**metrics, **of_sources}, controller
    )


def zero_advantage_rows(advantages: Tensor, parallel: ParallelContext) -> frozenset[int]:
    """Return the rows whose advantages [rows, W] are all 0; a row with NaN is not among them.

    Collective: all ranks use rank 0's rows. If rounding made ranks leave out different rows, some
    rows would be trained twice and others never.
    """
    is_zero = (advantages == 0).all(-1).float().tolist()
    of_ranks = parallel.all_gather(is_zero, "agreeing on samples without an advantage")
    return frozenset(row for row, zero in enumerate(of_ranks[0]) if zero)


def _metrics(
    rewards: Tensor, advantages: Tensor, returns: Tensor, responses: Tensor, mask: Tensor
) -> dict[str, float]:
    """Return ``critic/rewards`` over rows with tokens, advantages and returns over `mask`."""
    answered = responses.any(-1)
    return {
        **spread("critic/rewards", rewards.sum(-1, dtype=torch.float64)[answered]),
        **spread("critic/advantages", advantages[mask].double()),
        **spread("critic/returns", returns[mask].double()),
    }
