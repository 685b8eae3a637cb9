"""A whole run with remax: one sample and one greedy response to every prompt.

Its model is a mixture of experts on two trainer ranks, which share experts and the tokens of a row.
"""

from __future__ import annotations

import shutil

import pytest
from tokenizers import Tokenizer

from sluice.quickstart.model import make_model, save_model
from tests.support.small_run import Assets, Record, run_to_end

STEPS, PROMPTS = 3, 16
_SIZES = "actor_rollout_ref.actor.fsdp_config"


@pytest.fixture(scope="module")
def record(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The run."""
    folder = tmp_path_factory.mktemp("remax")
    shutil.copytree(small_assets.folder / "model", folder / "model")
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    save_model(make_model(tokenizer, seed=0, num_experts=4), folder / "model")
    return run_to_end(
        small_assets,
        folder / "run",
        [
            f"actor_rollout_ref.model.path={folder / 'model'}",
            "algorithm.adv_estimator=remax",
            "algorithm.filter_groups.enable=false",
            "actor_rollout_ref.rollout.n=1",
            f"data.train_batch_size={PROMPTS}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
            f"trainer.total_training_steps={STEPS}",
            "sluice.asynchrony.max_staleness=0",
            "sluice.rollout.batch_invariant=false",
            "sluice.rollout.replicas=1",
            "trainer.n_gpus_per_node=2",
            f"{_SIZES}.ulysses_sequence_parallel_size=2",
            f"{_SIZES}.expert_parallel_size=2",
        ],
    )


def test_remax_trains_against_a_greedy_baseline(record: Record) -> None:
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


def test_a_replica_samples_as_ranks_compute_that_divide_experts_and_rows(record: Record) -> None:
    for row in record.steps:
        # Weights change a lot in a step: an expert of the step before would be far off.
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0.0
        assert row["actor/moe/max_vio/max"] >= 0.0
