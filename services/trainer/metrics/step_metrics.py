"""One step's numbers by verl's names, from what the loop measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.types import TrainBatch


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step's parts, in the order they happen."""

    wait_batch_s: float
    train_s: float
    update_weights_s: float
    save_checkpoint_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class FleetInterval:
    """What the fleet did during a step."""

    generated_tokens: int
    busy_s: float
    replicas: int


def step_metrics(
    step: int,
    batch: TrainBatch,
    learner: Mapping[str, float],
    times: StepTimes,
    fleet: FleetInterval,
    *,
    ranks: int,
    stall_s: float,
) -> dict[str, float]:
    """Everything that is logged for one step.

    `perf/throughput` is prompt and response tokens per second and rank (verl §6.2);
    `trainer/idle_share` and `rollout/idle_share` are shares of the step's wall-clock.
    """
    total_tokens = sum(
        rollout.num_tokens + int(group.prompt_token_ids.size)
        for group in batch.groups
        for rollout in group.rollouts
    )
    replica_s = max(times.step_s * max(fleet.replicas, 1), 1e-9)
    step_s = max(times.step_s, 1e-9)
    return {
        **batch.statistics,
        **learner,
        "training/global_step": float(step),
        "timing_s/wait_batch": times.wait_batch_s,
        "timing_s/train": times.train_s,
        "timing_s/update_weights": times.update_weights_s,
        "timing_s/save_checkpoint": times.save_checkpoint_s,
        "timing_s/step": times.step_s,
        "perf/time_per_step": times.step_s,
        "perf/total_num_tokens": float(total_tokens),
        "perf/throughput": total_tokens / step_s / ranks,
        "trainer/idle_share": times.wait_batch_s / step_s,
        "rollout/idle_share": min(1.0, max(0.0, 1.0 - fleet.busy_s / replica_s)),
        "rollout/tokens_per_s": fleet.generated_tokens / step_s,
        "rollout/replicas": float(fleet.replicas),
        "weights/stall_s": stall_s,
    }
