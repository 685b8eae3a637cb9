"""One rank's share of each optimizer step of a train batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.trainer.learner.micro_batch import MicroBatch, build_micro_batch, training_rows
from sluice.algorithm.packing import (
    assign_rows_to_ranks,
    plan_micro_batches,
    plan_minibatches,
)
from sluice.config.actor_rollout_ref import ActorConfig
from sluice.types import TrainGroup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """`micro_batches` are this rank's; the counts are the mini-batch's over all ranks.

    `global_rows` counts empty responses too, `global_tokens` response tokens.
    """

    micro_batches: tuple[MicroBatch, ...]
    global_rows: int
    global_tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """Which share of the rows is this rank's."""

    rank: int
    world_size: int


def split_batch(
    groups: Sequence[TrainGroup],
    advantages: Sequence[npt.NDArray[np.float64]],
    actor: ActorConfig,
    share: Share,
    *,
    step: int,
    device: torch.device,
) -> list[MiniBatch]:
    """Cut a train batch into mini-batches of groups, and this rank's rows into micro-batches.

    With ``actor.shuffle`` groups are permuted first, by a generator of ``data_loader_seed`` and
    `step`; the mini-batches stay the same in all ``ppo_epochs`` passes.

    Raises:
        ConfigError: the groups do not divide into mini-batches.
    """
    order = np.arange(len(groups))
    if actor.shuffle:
        order = np.random.default_rng([actor.data_loader_seed, step]).permutation(len(groups))
    return [
        _mini_batch(
            [groups[order[i]] for i in members],
            [advantages[order[i]] for i in members],
            actor,
            share,
            device,
        )
        for members in plan_minibatches(len(groups), actor.ppo_mini_batch_size)
    ]


def _mini_batch(
    groups: Sequence[TrainGroup],
    advantages: Sequence[npt.NDArray[np.float64]],
    actor: ActorConfig,
    share: Share,
    device: torch.device,
) -> MiniBatch:
    rows = training_rows(groups, advantages)
    sizes = [row.size for row in rows]
    own = assign_rows_to_ranks(sizes, share.world_size)[share.rank]
    plans = plan_micro_batches(
        sizes,
        own,
        token_budget=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
        rows_per_micro=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
    )
    micro_batches = (build_micro_batch(rows, plan, device) for plan in plans)
    return MiniBatch(
        tuple(micro_batch for micro_batch in micro_batches if micro_batch is not None),
        global_rows=len(rows),
        global_tokens=sum(size.response_tokens for size in sizes),
    )
