"""A run of adapters in real processes: replicas sample as the trainer computes, and it resumes."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.support.small_run import Assets, run_to_end

SETTINGS = (
    "trainer.save_freq=3",
    "sluice.asynchrony.max_staleness=0",
    "sluice.rollout.replicas=1",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    "actor_rollout_ref.actor.use_kl_loss=true",
)


def test_replicas_sample_with_the_adapters_that_are_trained_also_after_a_restart(
    small_assets: Assets, tmp_path: Path
) -> None:
    for steps in (3, 6):
        total = [f"trainer.total_training_steps={steps}"]
        record = run_to_end(small_assets, tmp_path / "run", [*SETTINGS, *total])
        assert record.end.exit_code == 0, record.end.failures
        for row in record.steps:
            # Weights change a lot in a step: replicas of the step before would be far off.
            assert row["training/rollout_probs_diff_max"] < 1e-3
            assert row["actor/grad_norm"] > 0
        # A new run sends everything once, then only adapters.
        assert record.steps[-1]["weights/bytes_share"] < 0.2
    assert record.steps[-1]["training/global_step"] == 6
    assert record.steps[-1]["actor/kl_loss"] > record.steps[0]["actor/kl_loss"]
    folder = record.checkpoint(6) / "actor" / "lora_adapter"
    saved = load_file(folder / "adapter_model.safetensors")
    assert all(float(t.abs().max()) > 0 for n, t in saved.items() if ".lora_B." in n)
