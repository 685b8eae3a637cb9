"""Step metrics against the sample log of Ascend's practice guide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.reward.records.statistics import batch_content_metrics
from services.trainer.learner.batch.train_batch import BatchCut, split_batch
from services.trainer.learner.ranks import ParallelContext
from services.trainer.metrics.step_metrics import (
    FleetInterval,
    StepTimes,
    step_metrics,
)
from sluice.algorithm.batch_metrics import (
    BatchRows,
    batch_metrics,
    batch_rows,
    sequence_balance_metrics,
    throughput_metrics,
)
from sluice.types import (
    DataProgress,
    FinishReason,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
)
from tests.support.group_advantages import grpo_advantages

ROWS, GROUPS, SAMPLES, RANKS = 1024, 64, 16, 64
RESPONSE_TOKENS = 7562384
TOTAL_TOKENS = 7718944


def test_speed_equals_the_sample_logs() -> None:
    found = throughput_metrics(
        {"gen": 1315.245, "update_actor": 303.9206, "step": 1738.0275},
        total_tokens=TOTAL_TOKENS,
        response_tokens=RESPONSE_TOKENS,
        num_ranks=64,
    )
    assert found["timing_per_token_ms/gen"] == pytest.approx(0.173919, abs=1e-6)
    assert found["timing_per_token_ms/update_actor"] == pytest.approx(0.0393734, abs=1e-7)
    assert found["perf/throughput"] == pytest.approx(69.3939, abs=1e-4)
    assert found["perf/time_per_step"] == 1738.0275
    assert found["timing_s/gen"] == 1315.245


def test_mean_sequence_length_per_rank_equals_the_sample_logs() -> None:
    row_tokens = np.full(ROWS, TOTAL_TOKENS // ROWS, dtype=np.int64)
    row_tokens[0] += TOTAL_TOKENS - int(row_tokens.sum())
    ranks = [range(start, start + 16) for start in range(0, ROWS, 16)]
    found = sequence_balance_metrics(row_tokens, ranks)
    assert found["global_seqlen/mean"] == 120608.5


def test_clip_ratio_and_score_bounds_equal_the_sample_logs() -> None:
    response_lengths = np.full(ROWS, 7000, dtype=np.int64)
    response_lengths[:40] = 20480
    rewards = np.full(ROWS, 1.0)
    rewards[0] = -2.0  # wrong and of full length
    rows = BatchRows(rewards, np.full(ROWS, 152), response_lengths)
    found = batch_metrics(rows, max_prompt_tokens=2048, max_response_tokens=20480)
    assert found["response_length/clip_ratio"] == 0.0390625
    assert found["critic/score/min"] == -2.0


def rollout(index: int, num_tokens: int) -> Rollout:
    tokens, logprobs = np.zeros(num_tokens, np.uint32), np.zeros(num_tokens, np.float32)
    spans = (VersionSpan(0, 0, num_tokens),)
    return Rollout.of_one_turn(index, tokens, logprobs, spans, FinishReason.STOP, "")


def sample_batch() -> TrainBatch:
    """As many rows and tokens as the log's step: mean response 7385.140625, prompt 152.890625."""
    short, long = RESPONSE_TOKENS // ROWS, RESPONSE_TOKENS % ROWS
    few, more = (TOTAL_TOKENS - RESPONSE_TOKENS) // ROWS, 57
    scores = tuple(Scored(1.0, 1.0, {}) for _ in range(SAMPLES))
    groups = []
    for number in range(GROUPS):
        rows = range(number * SAMPLES, (number + 1) * SAMPLES)
        rollouts = tuple(rollout(i, short + (row < long)) for i, row in enumerate(rows))
        prompt = np.zeros(few + (number < more), np.uint32)
        groups.append(TrainGroup(f"p{number}", prompt, rollouts, scores, "s"))
    return TrainBatch("b", 0, tuple(groups), DataProgress(GROUPS), {})


def test_a_whole_step_equals_the_sample_logs() -> None:
    found = step_metrics(
        1,
        sample_batch(),
        {},
        StepTimes(1315.245, 303.9206, 0.0, 0.0, 1738.0275),
        FleetInterval(0, 0.0, 8),
        ranks=RANKS,
        dataset_rows=17917,
    )
    assert found["perf/total_num_tokens"] == TOTAL_TOKENS
    assert found["perf/throughput"] == pytest.approx(69.3939, abs=1e-4)
    assert found["timing_per_token_ms/gen"] == pytest.approx(0.173919, abs=1e-6)
    assert found["perf/time_per_step"] == found["timing_s/step"] == 1738.0275
    assert found["training/epoch"] == 0


def test_lengths_of_a_whole_step_equal_the_sample_logs() -> None:
    batch = sample_batch()
    rows = batch_rows(batch)
    found = batch_metrics(rows, max_prompt_tokens=2048, max_response_tokens=20480)
    assert found["response_length/mean"] == 7385.140625
    assert found["prompt_length/mean"] == 152.890625
    parallel = ParallelContext()
    parallel.world_size = RANKS
    (mini_batch,) = split_batch(
        batch.groups,
        BatchCut(GROUPS, None, rows_per_micro=1),
        parallel,
        step=1,
        device=torch.device("cpu"),
    )
    tokens = rows.prompt_lengths + rows.response_lengths
    balance = sequence_balance_metrics(tokens, mini_batch.rank_rows)
    assert balance["global_seqlen/mean"] == 120608.5
    assert (
        balance["global_seqlen/balanced_min"] <= 120608.5 <= balance["global_seqlen/balanced_max"]
    )


def test_the_difference_of_lengths_is_that_of_the_unbalanced_chunks() -> None:
    tokens = np.full(ROWS, TOTAL_TOKENS // ROWS, dtype=np.int64)
    tokens[:SAMPLES], tokens[-SAMPLES:] = 0, 0
    tokens[0], tokens[-1] = 33676, 326471
    ranks = [range(start, start + SAMPLES) for start in range(0, ROWS, SAMPLES)]
    found = sequence_balance_metrics(tokens, ranks)
    assert found["global_seqlen/min"] == 33676
    assert found["global_seqlen/max"] == 326471
    assert found["global_seqlen/minmax_diff"] == 292795


def test_the_age_of_rows_equals_verls() -> None:
    # verl/trainer/ppo/v1/trainer_base.py of 0.9.1, global step 6, with the rows' oldest and newest
    # weights 1..4, 3..3, 2..5; the row without tokens has no version here.
    spans = ([(1, 2), (2, 1), (4, 3)], [(3, 4)], [(2, 1), (5, 1)], [])
    rollouts = tuple(_sampled_by(i, versions) for i, versions in enumerate(spans))
    scores = tuple(Scored(1.0, 1.0, {}) for _ in spans)
    group = TrainGroup("p", np.zeros(3, np.uint32), rollouts, scores, "s")
    found = batch_content_metrics([group], 5, num_generated_tokens=12.0)
    golden = {
        "trajectory_spans": (3, 4, 1),
        "trajectory_staleness": (1, 2, 0),
        "trajectory_staleness_worst": (3, 4, 2),
    }
    for name, readings in golden.items():
        for reading, value in zip(("mean", "max", "min"), readings, strict=True):
            key = f"training/off_policy/{name}/{reading}"
            assert found[key] == pytest.approx(value), key
    assert (found["train/staleness_mean"], found["train/staleness_max"]) == (3, 4)


def test_a_batch_without_tokens_has_no_age() -> None:
    group = TrainGroup(
        "p", np.zeros(3, np.uint32), (_sampled_by(0, []),), (Scored(1.0, 1.0, {}),), "s"
    )
    found = batch_content_metrics([group], 5, num_generated_tokens=0.0)
    assert not [name for name in found if name.startswith("training/off_policy/")]


def _sampled_by(index: int, versions: list[tuple[int, int]]) -> Rollout:
    """A row by the versions that sampled it, each with its number of tokens."""
    spans, end = [], 0
    for version, tokens in versions:
        spans.append(VersionSpan(version, end, end + tokens))
        end += tokens
    tokens, logprobs = np.zeros(end, np.uint32), np.zeros(end, np.float32)
    return Rollout.of_one_turn(index, tokens, logprobs, tuple(spans), FinishReason.STOP, "")


def test_the_largest_advantage_of_the_sample_log_is_one_winner_in_16() -> None:
    rewards = np.full(SAMPLES, -1.0)
    rewards[0] = 1.0
    advantages = grpo_advantages(rewards, norm_by_std=True)
    assert advantages.max() == pytest.approx(3.74999, abs=1e-5)
