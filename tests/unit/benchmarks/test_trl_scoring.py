"""The reward that TRL trains on."""

from __future__ import annotations

import pytest

from benchmarks.quickstart.trl_job import dapo_reward


def test_a_reward_is_the_score_plus_the_overlong_penalty() -> None:
    rewards = dapo_reward(
        completions=["Answer: 17", "Answer: 18", "Answer: 17", "Answer: 17"],
        completion_ids=[[1] * 48, [1] * 48, [1] * 52, [1] * 56],
        ground_truth=["17"] * 4,
        prompts=["what TRL passes besides"],
    )
    assert rewards == pytest.approx([1.0, -1.0, 0.5, 0.0])
