"""The batch sizes of a run, and every number that follows from them (verl's normalisation).

Prompts and rows are kept apart by name: `train_prompts`, `mini_prompts` and `gen_prompts` count
prompts, everything called rows counts prompts times responses. A quotient that is no whole number
is `None`; the rules say so in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelSplit:
    """How trainer ranks are divided. `megatron` decides which sizes cut the data-parallel size.

    Args:
        nodes: machines of the trainer.
        ranks_per_node: trainer ranks on each.
        sp: Ulysses sequence parallel size (FSDP).
        fsdp_size: ranks of a shard group; below 1: all.
    """

    nodes: int
    ranks_per_node: int
    megatron: bool = False
    sp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    fsdp_size: int = -1

    @property
    def world(self) -> int:
        """Trainer ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same rows: sp, or TP·PP·CP."""
        return self.tp * self.pp * self.cp if self.megatron else self.sp

    @property
    def data_parallel(self) -> int | None:
        """D: replicas that train different rows."""
        return quotient(self.world, self.ranks_per_replica)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batch sizes of one run.

    Args:
        train_prompts: prompts of a train batch (data.train_batch_size).
        mini_prompts: prompts of a mini-batch (ppo_mini_batch_size).
        responses: responses of a prompt (rollout.n).
        epochs: passes over a train batch (ppo_epochs).
        gen_prompts: prompts of one generation round (data.gen_batch_size).
        micro_rows: rows of a micro-batch on one replica; `None` with a token budget.
        split: the trainer's ranks.
    """

    train_prompts: int
    mini_prompts: int
    responses: int
    epochs: int
    gen_prompts: int
    micro_rows: int | None
    split: ParallelSplit

    @property
    def rows(self) -> int:
        """Responses of a train batch: P·n."""
        return self.train_prompts * self.responses

    @property
    def rows_per_replica(self) -> int | None:
        """Rows of a train batch on one data-parallel rank: P·n / D."""
        return quotient(self.rows, self.split.data_parallel)

    @property
    def mini_rows(self) -> int:
        """Rows of a mini-batch over all ranks: M·n."""
        return self.mini_prompts * self.responses

    @property
    def mini_rows_per_replica(self) -> int | None:
        """The normalised mini-batch: M·n / D."""
        return quotient(self.mini_rows, self.split.data_parallel)

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches of a mini-batch: (M·n / D) / b; `None` with a token budget too."""
        return quotient(self.mini_rows_per_replica, self.micro_rows)

    @property
    def optimizer_steps(self) -> int | None:
        """Optimizer steps from a train batch: (P / M)·epochs."""
        mini_batches = quotient(self.train_prompts, self.mini_prompts)
        return None if mini_batches is None else mini_batches * self.epochs

    @property
    def gen_rows(self) -> int:
        """Responses of one generation round."""
        return self.gen_prompts * self.responses

    def steps_per_epoch(self, dataset_rows: int) -> int:
        """Generation rounds in one pass over the data, which is steps where nothing is filtered."""
        return dataset_rows // self.gen_prompts


def quotient(numerator: int | None, denominator: int | None) -> int | None:
    """numerator / denominator if both are known and it is whole."""
    if numerator is None or not denominator or numerator % denominator:
        return None
    return numerator // denominator


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is no larger than `at_most`, at least 1."""
    return next((d for d in range(min(at_most, number), 0, -1) if number % d == 0), 1)


def next_multiple(number: int, step: int) -> int:
    """The smallest multiple of `step` that is no smaller than `number`."""
    return math.ceil(number / step) * step
