"""Files that a configuration names must exist, and the size of a message fits a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config import derived
from sluice.config.loading.loader import load_config
from sluice.config.rules.checks import relation_problems
from sluice.config.rules.files import file_problems, model_problems

SOUND = (
    "data.train_files=train.parquet",
    "data.train_batch_size=64",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "algorithm.rollout_correction.rollout_is=token",
    "sluice.asynchrony.max_staleness=1",
)
ROLLOUT = "actor_rollout_ref.rollout"


def test_a_message_holds_a_sample_and_a_batchs_outline_however_large_the_batch_is() -> None:
    long = "data.max_response_length=20480"
    assert relation_problems(load_config(None, [*SOUND, long])) == []
    assert derived.message_mb(load_config(None, [*SOUND, long])) == 64
    assert derived.message_mb(load_config(None, [*SOUND, "data.max_response_length=7000000"])) == 81
    assert derived.message_mb(load_config(None, [*SOUND, "data.train_batch_size=32768"])) == 128
    assert derived.message_mb(load_config(None, [*SOUND, long, "sluice.max_message_mb=9"])) == 9


def test_a_rank_takes_its_share_of_a_batch() -> None:
    config = load_config(None, [*SOUND, "data.max_response_length=20480"])
    whole = derived.taken_samples_mb(config, 1)
    assert whole == 81
    assert derived.taken_samples_mb(config, 8) == 11


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_run_needs_prompts_or_a_number_of_steps(tmp_path: Path) -> None:
    overrides = ["data.train_files=null", f"sluice.run_dir={tmp_path}"]
    (found,) = file_problems(load_config(None, overrides))
    assert "the run has no length" in found.text
    assert file_problems(load_config(None, [*overrides, "trainer.total_training_steps=1"])) == []


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("config.json", "holds no config.json"),
        ("tokenizer.json", "holds no tokenizer"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, missing: str, named: str) -> None:
    model = make_model(tmp_path / "model")
    assert list(model_problems(str(model))) == []
    (model / missing).unlink()
    (found,) = model_problems(str(model))
    assert named in found.text
