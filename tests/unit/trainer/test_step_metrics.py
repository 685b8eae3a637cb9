"""Metrics of one step by verl's names, and the balance of tokens over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.trainer.learner.batch.train_batch import BatchCut, split_batch
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.metrics.step_metrics import FleetInterval, StepTimes, step_metrics
from sluice.types import (
    DataProgress,
    FinishReason,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
)
from tests.support.tiny_policy import make_batch, make_config, save_model

TIMES = StepTimes(
    wait_batch_s=1.0, train_s=2.0, update_weights_s=0.5, save_checkpoint_s=0.25, step_s=4.0
)
FLEET = FleetInterval(generated_tokens=400, busy_s=6.0, replicas=2)


def batch(*lengths: int, low_water: int = 1, **statistics: float) -> TrainBatch:
    rollouts = tuple(
        Rollout.of_one_turn(
            i,
            np.zeros(n, np.uint32),
            np.zeros(n, np.float32),
            (VersionSpan(0, 0, n),),
            FinishReason.STOP,
            "",
        )
        for i, n in enumerate(lengths)
    )
    scores = tuple(Scored(1.0, 1.0, {}) for _ in lengths)
    group = TrainGroup("p", np.zeros(10, np.uint32), rollouts, scores, "s")
    return TrainBatch(
        "b", 0, (group,), DataProgress(low_water), {"train/groups_kept": 5.0} | statistics
    )


def metrics(
    times: StepTimes = TIMES,
    fleet: FleetInterval = FLEET,
    *,
    low_water: int = 1,
    dataset_rows: int = 8,
    **statistics: float,
) -> dict[str, float]:
    return step_metrics(
        7,
        batch(20, 30, low_water=low_water, **statistics),
        {"actor/pg_loss": 0.5},
        times,
        fleet,
        ranks=2,
        dataset_rows=dataset_rows,
    )


def test_numbers_of_batch_and_learner_are_passed_on() -> None:
    found = metrics()
    assert (found["train/groups_kept"], found["actor/pg_loss"]) == (5.0, 0.5)
    assert found["training/global_step"] == 7.0


def test_idle_shares_are_shares_of_the_step() -> None:
    found = metrics()
    assert found["trainer/idle_share"] == pytest.approx(1.0 / 4.0)
    assert found["rollout/idle_share"] == pytest.approx(1.0 - 6.0 / (2 * 4.0))
    assert found["rollout/tokens_per_s"] == pytest.approx(100.0)


@pytest.mark.parametrize(("busy_s", "share"), [(9.0, 0.0), (0.0, 1.0), (-1.0, 1.0)])
def test_heartbeats_that_come_late_do_not_push_a_share_out_of_bounds(
    busy_s: float, share: float
) -> None:
    assert metrics(fleet=FleetInterval(0, busy_s, 2))["rollout/idle_share"] == share


def test_prefix_hits_are_a_share_of_the_steps_prompt_tokens() -> None:
    fleet = FleetInterval(400, 6.0, 2, prompt_tokens=200, reused_tokens=150)
    assert metrics(fleet=fleet)["rollout/prefix_hit_rate"] == 0.75
    assert "rollout/prefix_hit_rate" not in metrics(fleet=FleetInterval(400, 6.0, 2))


def test_a_step_without_replicas_or_time_divides_by_nothing() -> None:
    found = metrics(StepTimes(0, 0, 0, 0, 0), FleetInterval(0, 0.0, 0))
    assert all(np.isfinite(value) for value in found.values())


def test_what_the_trainer_waits_for_a_batch_is_its_time_of_generation() -> None:
    found = metrics()
    assert found["timing_s/gen"] == found["timing_s/wait_batch"] == 1.0
    assert (found["timing_s/train"], found["timing_s/update_weights"]) == (2.0, 0.5)
    assert found["timing_s/save_checkpoint"] == 0.25
    assert found["timing_per_token_ms/gen"] == pytest.approx(1000.0 * 1.0 / (20 + 30))


@pytest.mark.parametrize(("reported", "found"), [(0.0, 0.0), (0.75, 0.75), (60.0, 1.0)])
def test_of_the_wait_for_a_batch_only_the_trainers_own_part_is_of_groups(
    reported: float, found: float
) -> None:
    assert metrics(**{"timing_s/wait_groups": reported})["timing_s/wait_groups"] == found


def test_a_reward_service_that_does_not_tell_the_wait_for_groups_leaves_it_out() -> None:
    assert "timing_s/wait_groups" not in metrics()


@pytest.mark.parametrize(("low_water", "epoch"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_the_epoch_counts_passes_from_0(low_water: int, epoch: int) -> None:
    assert metrics(low_water=low_water)["training/epoch"] == epoch


def test_a_run_without_a_data_set_has_no_epochs() -> None:
    assert "training/epoch" not in metrics(dataset_rows=0)


def test_times_of_generation_are_over_the_replicas_that_serve() -> None:
    seconds = (*(float(i) for i in range(1, 20)), 40.0)  # the 90th percentile is 18.1
    found = metrics(fleet=replace(FLEET, replica_busy_s=seconds))
    assert found["timing_s/generate_sequences"] == 11.5
    timing = "timing_s/generation_timing"
    assert (found[f"{timing}/max"], found[f"{timing}/min"]) == (40.0, 1.0)
    assert found[f"{timing}/topk_ratio"] == 2 / 20
    equal = metrics(fleet=replace(FLEET, replica_busy_s=(3.0, 3.0)))
    assert equal[f"{timing}/topk_ratio"] == 0.0


def test_a_fleet_without_replicas_has_no_times_of_generation() -> None:
    found = metrics()
    assert "timing_s/generate_sequences" not in found
    assert "timing_s/generation_timing/max" not in found


STEP = 3


@pytest.mark.parametrize("whole_groups", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_are_counted_for_the_rank_that_trains_them(
    num_ranks: int, seed: int | None, *, whole_groups: bool
) -> None:
    batch, skipped = make_batch(), {4}
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    cut = BatchCut(3, 64, None, seed, whole_groups)
    rows: list[int] = []
    for rank in range(num_ranks):
        parallel = ParallelContext()
        parallel.rank, parallel.world_size = rank, num_ranks
        mini_batches = split_batch(
            batch.groups,
            cut,
            parallel,
            step=STEP,
            device=torch.device("cpu"),
            skipped=skipped,
        )
        for mini_batch in mini_batches:
            own = mini_batch.rank_rows[rank]
            rows += own
            trained = sum(one.behavior_logprobs.numel() for one in mini_batch.micro_batches)
            assert sum(rollouts[row].num_tokens for row in own) == trained
    assert sorted(rows) == sorted(set(range(len(rollouts))) - skipped)


def test_one_rank_has_everything(tmp_path: Path) -> None:
    batch = make_batch()
    learner = Learner(make_config(save_model(tmp_path)), ParallelContext(), total_steps=10)
    metrics = learner.train_step(batch, 1)
    found = {name: value for name, value in metrics.items() if name.startswith("global_seqlen/")}
    total = sum(
        group.prompt_token_ids.size + rollout.num_tokens
        for group in batch.groups
        for rollout in group.rollouts
    )
    assert found.pop("global_seqlen/minmax_diff") == 0
    assert set(found) == {
        f"global_seqlen/{name}" for name in ("min", "max", "balanced_min", "balanced_max", "mean")
    }
    assert set(found.values()) == {float(total)}
