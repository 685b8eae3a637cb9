"""A train batch as tables [rows, longest response], and the conversion from and to micro-batches.

Advantages need the whole batch, while forward passes run on packed micro-batches of one rank;
tables collect the results of all ranks' passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.ranks.parallel import DataParallel
from sluice.errors import ConfigError
from sluice.types import TrainBatch


@dataclass(frozen=True, slots=True, eq=False)
class BatchTable:
    """The batch's rows in the order of its groups and their rollouts; W is the longest response."""

    scores: Tensor  # float32 [rows], shaped rewards
    group_index: Tensor  # int64 [rows]
    mask: Tensor  # bool [rows, W], true at response tokens
    baselines: Tensor  # float32 [rows], reward of the prompt's greedy response; nan: none given
    group_without_baseline: str | None  # batch and group of the first

    @property
    def width(self) -> int:
        """Return W, at least 1."""
        return self.mask.shape[1]


def batch_table(batch: TrainBatch, device: torch.device) -> BatchTable:
    """Return the batch as a table."""
    rows = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.rollouts))]
    lengths = torch.tensor([batch.groups[g].rollouts[i].num_tokens for g, i in rows], device=device)
    width = max(1, int(lengths.max()))
    return BatchTable(
        scores=torch.tensor(
            [batch.groups[g].scores[i].reward for g, i in rows], dtype=torch.float32, device=device
        ),
        group_index=torch.tensor([g for g, _ in rows], device=device),
        mask=torch.arange(width, device=device) < lengths[:, None],
        baselines=_baselines(batch, device),
        group_without_baseline=_group_without_baseline(batch),
    )


def _group_without_baseline(batch: TrainBatch) -> str | None:
    without = (group.prompt_id for group in batch.groups if group.baseline_reward is None)
    first = next(without, None)
    return None if first is None else f"batch {batch.batch_id}, group {first}"


def _baselines(batch: TrainBatch, device: torch.device) -> Tensor:
    missing = float("nan")
    found = [
        missing if group.baseline_reward is None else group.baseline_reward
        for group in batch.groups
        for _ in group.rollouts
    ]
    return torch.tensor(found, dtype=torch.float32, device=device)


def reward_components(
    batch: TrainBatch, names: Sequence[str], device: torch.device
) -> Mapping[str, Tensor]:
    """Return named values of the scorer, float32 [rows] each.

    Raises:
        ConfigError: a sample lacks a value.
    """
    scores = [scored for group in batch.groups for scored in group.scores]
    for name in names:
        if any(name not in scored.metrics for scored in scores):
            known = sorted(set[str]().union(*(scored.metrics for scored in scores)))
            raise ConfigError(
                f"algorithm.gdpo_reward_keys: '{name}' is not among the values that the reward "
                f"function returns for every sample ({', '.join(known)})"
            )
    return {
        name: torch.tensor([scored.metrics[name] for scored in scores], device=device)
        for name in names
    }


def gather_tokens(
    found: Iterable[tuple[MicroBatch, Tensor]],
    table: BatchTable,
    parallel: DataParallel,
    phase: str,
) -> Tensor:
    """Return a table [rows, W] of the values [N] of all ranks' micro-batches. Collective.

    Each token is one rank's, so a sum over ranks puts the table together; it is 0 off the mask.
    """
    values = torch.zeros(table.mask.shape, dtype=torch.float32, device=table.mask.device)
    for micro_batch, tokens in found:
        values[micro_batch.batch_rows, micro_batch.columns] = tokens.detach().float()
    parallel.all_reduce_sum([values], phase)
    return values


def tokens_of(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return the values [N] of a micro-batch's tokens from a table."""
    return values[micro_batch.batch_rows, micro_batch.columns]
