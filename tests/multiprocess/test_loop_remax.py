"""A whole run with remax: one sample and one greedy response to every prompt."""

from __future__ import annotations

from pathlib import Path

from tests.support.small_run import Assets, run_to_end

STEPS, PROMPTS = 4, 16


def test_remax_trains_against_a_greedy_baseline(small_assets: Assets, tmp_path: Path) -> None:
    record = run_to_end(
        small_assets,
        tmp_path / "run",
        [
            "algorithm.adv_estimator=remax",
            "algorithm.filter_groups.enable=false",
            "actor_rollout_ref.rollout.n=1",
            f"data.train_batch_size={PROMPTS}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            f"trainer.total_training_steps={STEPS}",
        ],
    )
    assert record.end.exit_code == 0, record.end.failures
    assert len(record.steps) == STEPS
    rows = record.steps
    for row in rows:
        assert row["critic/returns/min"] >= 0.0  # rewards are 0 and 1
        assert -1.0 <= row["critic/advantages/min"] <= row["critic/advantages/max"] <= 1.0
    # Only a baseline makes an advantage of a reward of 0 negative.
    assert min(row["critic/advantages/min"] for row in rows) == -1.0
    assert max(row["actor/grad_norm"] for row in rows) > 0.0
    sampled, greedy, trained = (
        sum(row[f"train/{name}_tokens"] for row in rows)
        for name in ("generated", "greedy", "trained")
    )
    assert sampled - greedy >= trained > 0.0
    assert greedy > 0.0
    assert sum(row["train/samples_graded"] for row in rows) >= 2 * STEPS * PROMPTS
    assert record.accounts["trained"] == STEPS * PROMPTS
    assert record.accounts["dropped_failed"] == 0
