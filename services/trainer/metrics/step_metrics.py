"""Metrics of one step by verl's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sluice.algorithm.batch_metrics import batch_tokens, throughput_metrics
from sluice.device.cpu import used_memory_bytes
from sluice.telemetry.metric_names import WAIT_GROUPS_S
from sluice.types import TrainBatch

_SLOW_QUANTILE = 0.9


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
    """The fleet's work during a step; `replica_busy_s`: of each replica that serves."""

    generated_tokens: int
    busy_s: float
    replicas: int
    prompt_tokens: int = 0
    reused_tokens: int = 0
    replica_busy_s: tuple[float, ...] = ()


def step_metrics(
    step: int,
    batch: TrainBatch,
    learned: Mapping[str, float],
    times: StepTimes,
    fleet: FleetInterval,
    *,
    ranks: int,
    dataset_rows: int,
) -> dict[str, float]:
    """Return all metrics of one step; `docs/metrics.md` defines each name.

    `timing_s/gen` is the wait for the batch: generation runs concurrently with training, so this
    wait is all that it costs a step. With `dataset_rows` 0 only clients submit prompts.
    """
    step_s = max(times.step_s, 1e-9)
    replica_s = max(times.step_s * max(fleet.replicas, 1), 1e-9)
    return {
        **batch.statistics,
        **learned,
        **_wait_groups(batch, times.wait_batch_s),
        **_speed(batch, times, ranks),
        **_epoch(batch, dataset_rows),
        "training/global_step": float(step),
        "timing_s/wait_batch": times.wait_batch_s,
        "timing_s/train": times.train_s,
        "trainer/idle_share": times.wait_batch_s / step_s,
        "rollout/idle_share": min(1.0, max(0.0, 1.0 - fleet.busy_s / replica_s)),
        "rollout/tokens_per_s": fleet.generated_tokens / step_s,
        "rollout/replicas": float(fleet.replicas),
        **_prefix_hits(fleet),
        **_generation_times(fleet.replica_busy_s),
    }


def _prefix_hits(fleet: FleetInterval) -> dict[str, float]:
    """Return the share of the prompts' tokens that needed no computing; nothing without prompts."""
    if fleet.prompt_tokens <= 0:
        return {}
    return {"rollout/prefix_hit_rate": fleet.reused_tokens / fleet.prompt_tokens}


def _generation_times(busy_s: Sequence[float]) -> dict[str, float]:
    """Return how long replicas sampled: on average, at most, at least, and the share of slow ones.

    As in verl the slow ones are those beyond the 90th percentile
    (`verl/utils/profiler/performance.py`, `topk_reduce_ratio_min_max`).
    """
    if not busy_s:
        return {}
    seconds = np.asarray(busy_s)
    slow = seconds > np.quantile(seconds, _SLOW_QUANTILE)
    return {
        "timing_s/generate_sequences": float(seconds.mean()),
        "timing_s/generation_timing/max": float(seconds.max()),
        "timing_s/generation_timing/min": float(seconds.min()),
        "timing_s/generation_timing/topk_ratio": float(slow.mean()),
    }


def host_memory_metrics() -> dict[str, float]:
    """Return ``perf/cpu_memory_used_gb``: memory of this machine that is in use, GiB."""
    return {"perf/cpu_memory_used_gb": used_memory_bytes() / float(1 << 30)}


def account_metrics(accounts: Mapping[str, float]) -> dict[str, float]:
    """Return the accounts, by their names in `accounts.json`, as metrics of a step."""
    return {f"accounts/{name}": value for name, value in accounts.items()}


def _wait_groups(batch: TrainBatch, wait_batch_s: float) -> dict[str, float]:
    """Return the batch's wait for groups, at most this trainer's own wait.

    The reward service keeps counting when a trainer dies while it waits; the next trainer waits
    less than that.
    """
    seconds = batch.statistics.get(WAIT_GROUPS_S)
    return {} if seconds is None else {WAIT_GROUPS_S: min(seconds, wait_batch_s)}


def _speed(batch: TrainBatch, times: StepTimes, ranks: int) -> dict[str, float]:
    response_tokens, total_tokens = batch_tokens(batch)
    phases = {
        "gen": times.wait_batch_s,
        "update_weights": times.update_weights_s,
        "save_checkpoint": times.save_checkpoint_s,
        "step": times.step_s,
    }
    return throughput_metrics(
        phases, total_tokens=total_tokens, response_tokens=response_tokens, num_ranks=ranks
    )


def _epoch(batch: TrainBatch, dataset_rows: int) -> dict[str, float]:
    """Return the epoch, from 0, of the last row whose predecessors have all ended."""
    if not dataset_rows:
        return {}
    return {"training/epoch": float(max(batch.progress.low_water - 1, 0) // dataset_rows)}
