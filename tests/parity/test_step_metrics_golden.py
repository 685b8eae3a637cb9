"""Step metrics against the sample log of the practice guide (reference sheet 6.2)."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.algorithm.batch_metrics import BatchRows, batch_metrics, sequence_balance_metrics
from sluice.algorithm.throughput_metrics import throughput_metrics

ROWS = 1024
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
    rows = BatchRows(rewards, np.zeros(ROWS), np.full(ROWS, 152), response_lengths)
    found = batch_metrics(rows, max_prompt_tokens=2048, max_response_tokens=20480)
    assert found["response_length/clip_ratio"] == 0.0390625
    assert found["critic/score/min"] == -2.0
