"""A run reads images only if its model and whatever else sees a prompt do."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.derived import prompt_images
from sluice.config.loading.loader import load_config
from sluice.vision.image_limits import ImageLimits


def limits(tmp_path: Path, family: str, *overrides: str) -> ImageLimits | None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}", "vision_config": {{}}}}')
    sound = [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=f"]
    return prompt_images(load_config(None, [*sound, *overrides]))


@pytest.mark.parametrize("engine", ["torch", "vllm", "sglang"])
def test_a_known_family_reads_images(tmp_path: Path, engine: str) -> None:
    found = limits(tmp_path, "qwen2_5_vl", f"actor_rollout_ref.rollout.name={engine}")
    assert found == ImageLimits()


@pytest.mark.parametrize(
    ("family", "override"),
    [
        ("qwen3", "trainer.total_epochs=1"),
        ("gemma3", "trainer.total_epochs=1"),
        ("qwen2_5_vl", "algorithm.adv_estimator=gae"),
    ],
)
def test_another_family_and_a_critic_read_text_alone(
    tmp_path: Path, family: str, override: str
) -> None:
    assert limits(tmp_path, family, override) is None


def test_a_model_that_this_machine_does_not_have_may_read_images(tmp_path: Path) -> None:
    sound = [f"actor_rollout_ref.model.path={tmp_path / 'none'}", "data.train_files=f"]
    assert prompt_images(load_config(None, sound)) == ImageLimits()
