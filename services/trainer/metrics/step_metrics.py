"""Metrics of one step by verl's names, and the balance of its tokens over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sluice.algorithm.batch_metrics import IntRows, sequence_balance_metrics, throughput_metrics
from sluice.algorithm.packing import (
    RowSize,
    assign_groups_to_ranks,
    assign_rows_to_ranks,
    plan_minibatches,
)
from sluice.algorithm.registry import GROUP_LOSSES
from sluice.config.run import RunConfig
from sluice.types import TrainBatch

_WAIT_GROUPS = "timing_s/wait_groups"


@dataclass(frozen=True, slots=True)
class Example:
    """One validation response for readers."""

    prompt: str
    response: str
    ground_truth: str
    score: float


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Validation numbers of one version."""

    metrics: Mapping[str, float]
    examples: tuple[Example, ...]
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class RankCut:
    """The way a train batch is cut, as in `learner.batch.mini_batch.split_batch`.

    With `shuffle_seed` None, groups keep their order; with `whole_groups`, all rows of a prompt go
    to one rank.
    """

    mini_batch_groups: int
    num_ranks: int
    shuffle_seed: int | None
    whole_groups: bool = False


def rank_cut(config: RunConfig, num_ranks: int) -> RankCut:
    """Return the configured cut."""
    actor = config.actor_rollout_ref.actor
    seed = actor.data_loader_seed if actor.shuffle else None
    whole_groups = actor.policy_loss.loss_mode in GROUP_LOSSES
    return RankCut(actor.ppo_mini_batch_size, num_ranks, seed, whole_groups)


def row_tokens(batch: TrainBatch) -> IntRows:
    """Return prompt plus response tokens of each row, int64 [rows], in batch order."""
    return np.array(
        [
            group.prompt_token_ids.size + rollout.num_tokens
            for group in batch.groups
            for rollout in group.rollouts
        ],
        dtype=np.int64,
    )


def rank_rows(batch: TrainBatch, step: int, cut: RankCut) -> list[list[int]]:
    """Return the rows that each rank trains in `step`, over all mini-batches of one pass.

    This repeats the learner's cut on rank 0 without tensors; both use the same planning functions.
    """
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
    """Return ``global_seqlen/*`` of one step."""
    return sequence_balance_metrics(row_tokens(batch), rank_rows(batch, step, cut))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step's parts, in order."""

    wait_batch_s: float
    train_s: float
    update_weights_s: float
    save_checkpoint_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class FleetInterval:
    """The fleet's work during a step."""

    generated_tokens: int
    busy_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class RunScale:
    """Number of trainer ranks, and rows of the training set (0: only clients submit prompts)."""

    ranks: int
    dataset_rows: int


def step_metrics(
    step: int,
    batch: TrainBatch,
    learner: Mapping[str, float],
    times: StepTimes,
    fleet: FleetInterval,
    *,
    scale: RunScale,
    stall_s: float,
) -> dict[str, float]:
    """Return all metrics of one step; `docs/metrics.md` defines each name.

    `timing_s/gen` is the wait for the batch: generation runs concurrently with training, so this
    wait is all that it costs a step.
    """
    step_s = max(times.step_s, 1e-9)
    replica_s = max(times.step_s * max(fleet.replicas, 1), 1e-9)
    return {
        **batch.statistics,
        **learner,
        **_wait_groups(batch, times.wait_batch_s),
        **_speed(batch, times, scale.ranks),
        **_epoch(batch, scale.dataset_rows),
        "training/global_step": float(step),
        "timing_s/wait_batch": times.wait_batch_s,
        "timing_s/train": times.train_s,
        "trainer/idle_share": times.wait_batch_s / step_s,
        "rollout/idle_share": min(1.0, max(0.0, 1.0 - fleet.busy_s / replica_s)),
        "rollout/tokens_per_s": fleet.generated_tokens / step_s,
        "rollout/replicas": float(fleet.replicas),
        "weights/stall_s": stall_s,
    }


def account_metrics(accounts: Mapping[str, float]) -> dict[str, float]:
    """Return the accounts, by their names in `accounts.json`, as metrics of a step."""
    return {f"accounts/{name}": value for name, value in accounts.items()}


def _wait_groups(batch: TrainBatch, wait_batch_s: float) -> dict[str, float]:
    """Return the batch's wait for groups, at most this trainer's own wait.

    The reward service keeps counting when a trainer dies while it waits; the next trainer waits
    less than that.
    """
    found = batch.statistics.get(_WAIT_GROUPS)
    return {} if found is None else {_WAIT_GROUPS: min(found, wait_batch_s)}


def _speed(batch: TrainBatch, times: StepTimes, ranks: int) -> dict[str, float]:
    response_tokens = sum(r.num_tokens for group in batch.groups for r in group.rollouts)
    prompt_tokens = sum(int(g.prompt_token_ids.size) * len(g.rollouts) for g in batch.groups)
    total_tokens = prompt_tokens + response_tokens
    phases = {
        "gen": times.wait_batch_s,
        "update_weights": times.update_weights_s,
        "save_checkpoint": times.save_checkpoint_s,
        "step": times.step_s,
    }
    speed = throughput_metrics(
        phases, total_tokens=total_tokens, response_tokens=response_tokens, num_ranks=ranks
    )
    return {**speed, "perf/total_num_tokens": float(total_tokens)}


def _epoch(batch: TrainBatch, dataset_rows: int) -> dict[str, float]:
    """Return the epoch, from 0, of the last row before which every row has ended."""
    if not dataset_rows:
        return {}
    return {"training/epoch": float(max(batch.progress.low_water - 1, 0) // dataset_rows)}
