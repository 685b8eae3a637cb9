"""Metrics of a train batch."""

from __future__ import annotations

import numpy as np

from sluice.algorithm.batch_metrics import (
    BatchRows,
    batch_metrics,
    batch_rows,
    batch_tokens,
    sequence_balance_metrics,
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


def rollout(index: int, num_tokens: int) -> Rollout:
    spans = (VersionSpan(0, 0, num_tokens),) if num_tokens else ()
    return Rollout.of_one_turn(
        index,
        np.zeros(num_tokens, dtype=np.uint32),
        np.zeros(num_tokens, dtype=np.float32),
        spans,
        FinishReason.STOP,
        "",
    )


def train_batch() -> TrainBatch:
    groups = [
        TrainGroup(
            f"p{number}",
            np.zeros(prompt_tokens, dtype=np.uint32),
            (rollout(0, 2), rollout(1, 4)),
            (Scored(1.0, 0.5, {}), Scored(-1.0, -1.0, {})),
            "math_dapo",
        )
        for number, prompt_tokens in enumerate((3, 5))
    ]
    return TrainBatch("b0", 0, tuple(groups), DataProgress(2), {})


def test_rows_follow_groups_and_their_rollouts() -> None:
    rows = batch_rows(train_batch())
    assert rows.prompt_lengths.tolist() == [3, 3, 5, 5]
    assert rows.response_lengths.tolist() == [2, 4, 2, 4]
    assert rows.rewards.tolist() == [0.5, -1.0, 0.5, -1.0]


def test_scores_and_lengths_are_by_row() -> None:
    rows = batch_rows(train_batch())
    found = batch_metrics(rows, max_prompt_tokens=5, max_response_tokens=8)
    assert found["critic/score/mean"] == -0.25
    assert found["prompt_length/clip_ratio"] == 0.5
    assert found["response_length/mean"] == 3.0


def test_rows_without_tokens_count_as_aborted_only() -> None:
    rows = BatchRows(np.array([1.0, -9.0]), np.array([3, 3]), np.array([2, 0]))
    found = batch_metrics(rows, max_prompt_tokens=5, max_response_tokens=8)
    assert found["response/aborted_ratio"] == 0.5
    assert found["response_length/min"] == 0.0
    assert found["response_length_non_aborted/min"] == 2.0
    assert found["critic/score/min"] == 1.0


def test_metrics_over_nothing_are_left_out() -> None:
    rows = BatchRows(np.array([1.0]), np.array([3]), np.array([0]))
    found = batch_metrics(rows, max_prompt_tokens=5, max_response_tokens=8)
    assert "critic/score/mean" not in found
    assert found["response/aborted_ratio"] == 1.0


def test_balance_compares_consecutive_chunks_with_the_assignment_used() -> None:
    found = sequence_balance_metrics(np.array([10, 20, 30, 40]), [(0, 3), (1, 2)])
    assert found == {
        "global_seqlen/min": 30.0,
        "global_seqlen/max": 70.0,
        "global_seqlen/minmax_diff": 40.0,
        "global_seqlen/balanced_min": 50.0,
        "global_seqlen/balanced_max": 50.0,
        "global_seqlen/mean": 50.0,
    }


def test_a_prompt_counts_for_each_of_its_rows() -> None:
    assert batch_tokens(train_batch()) == (12, 28)
