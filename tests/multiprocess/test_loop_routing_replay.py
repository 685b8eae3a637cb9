"""Routing replay R3 in a real run: the embedded engine's experts reach the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.small_run import Assets, run_to_end


@pytest.fixture
def mixture(small_assets: Assets, tmp_path: Path) -> Path:
    """The model's folder: as large as the small run's, with experts."""
    folder = tmp_path / "model"
    dense = small_assets.folder / "model"
    given = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{
            key: value for key, value in given.items() if key not in ("model_type", "architectures")
        },
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in dense.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_the_trainer_follows_the_experts_that_the_engine_chose(
    small_assets: Assets, mixture: Path, tmp_path: Path
) -> None:
    record = run_to_end(
        small_assets,
        tmp_path / "run",
        [
            f"actor_rollout_ref.model.path={mixture}",
            "actor_rollout_ref.actor.router_replay.mode=R3",
            "sluice.rollout.replicas=1",
            "trainer.total_training_steps=1",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
        ],
    )
    (step,) = record.steps
    assert step["actor/moe/engine_samples"] == 1.0
    # Both have the same weights in float32: the trainer's router would choose nearly the same.
    assert 0.98 < step["actor/moe/engine_agreement"] <= 1.0
    assert step["training/rollout_probs_diff_max"] < 1e-3
