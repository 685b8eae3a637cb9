"""How evenly a train batch's tokens fall on the trainer's ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sluice.algorithm.batch_metrics import IntRows, sequence_balance_metrics
from sluice.algorithm.losses.adpo_groups import assign_groups_to_ranks
from sluice.algorithm.losses.registry import GROUP_LOSSES
from sluice.algorithm.packing import RowSize, assign_rows_to_ranks, plan_minibatches
from sluice.config.run import RunConfig
from sluice.types import TrainBatch


@dataclass(frozen=True, slots=True)
class RankCut:
    """How batches are cut: what `learner.mini_batch.split_batch` is given.

    `shuffle_seed` is None where groups keep their order; with `whole_groups` a prompt's rows are
    never split between ranks.
    """

    mini_batch_groups: int
    num_ranks: int
    shuffle_seed: int | None
    whole_groups: bool = False


def rank_cut(config: RunConfig, num_ranks: int) -> RankCut:
    """The cut that the configuration asks for."""
    actor = config.actor_rollout_ref.actor
    seed = actor.data_loader_seed if actor.shuffle else None
    whole_groups = actor.policy_loss.loss_mode in GROUP_LOSSES
    return RankCut(actor.ppo_mini_batch_size, num_ranks, seed, whole_groups)


def row_tokens(batch: TrainBatch) -> IntRows:
    """Prompt and response tokens of each row, int64 [rows], in the order of the batch."""
    return np.array(
        [
            group.prompt_token_ids.size + rollout.num_tokens
            for group in batch.groups
            for rollout in group.rollouts
        ],
        dtype=np.int64,
    )


def rank_rows(batch: TrainBatch, step: int, cut: RankCut) -> list[list[int]]:
    """Rows that each rank trains in `step`, over all mini-batches of one pass."""
    ends = np.cumsum([len(group.rollouts) for group in batch.groups])
    rows_of = [range(end - len(g.rollouts), end) for g, end in zip(batch.groups, ends, strict=True)]
    order = np.arange(len(batch.groups))
    if cut.shuffle_seed is not None:
        order = np.random.default_rng([cut.shuffle_seed, step]).permutation(len(order))
    ranks: list[list[int]] = [[] for _ in range(cut.num_ranks)]
    for members in plan_minibatches(len(order), cut.mini_batch_groups):
        chosen = [int(order[i]) for i in members]
        rows = [row for group in chosen for row in rows_of[group]]
        sizes = [
            RowSize(number, int(batch.groups[group].prompt_token_ids.size), rollout.num_tokens)
            for number, group in enumerate(chosen)
            for rollout in batch.groups[group].rollouts
        ]
        assign = assign_groups_to_ranks if cut.whole_groups else assign_rows_to_ranks
        for rank, own in zip(ranks, assign(sizes, cut.num_ranks), strict=True):
            rank += [rows[i] for i in own]
    return ranks


def balance_metrics(batch: TrainBatch, step: int, cut: RankCut) -> dict[str, float]:
    """``global_seqlen/*`` of one step."""
    return sequence_balance_metrics(row_tokens(batch), rank_rows(batch, step, cut))
