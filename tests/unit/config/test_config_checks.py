"""Files that a configuration names must exist, and the size of a message fits a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config import derived
from sluice.config.loading.loader import load_config
from sluice.config.rules.checks import check_config, relation_problems
from sluice.errors import ConfigError

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


def test_files_that_exist_pass(tmp_path: Path) -> None:
    train = tmp_path / "train.parquet"
    train.touch()
    config = load_config(
        None,
        [
            *SOUND,
            f"actor_rollout_ref.model.path={make_model(tmp_path / 'model')}",
            f"data.train_files={train}",
            f"sluice.run_dir={tmp_path / 'run'}",
        ],
    )
    check_config(config)


def test_every_missing_file_is_named_together_with_the_contradictions(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            *SOUND,
            f"{ROLLOUT}.n=1",
            "algorithm.adv_estimator=grpo_passk",
            f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            f"data.train_files={tmp_path / 'train.parquet'}",
            f"data.val_files=[{tmp_path / 'a.parquet'}, {tmp_path / 'b.parquet'}]",
            f"reward.custom_reward_function.path={tmp_path / 'score.py'}",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={tmp_path / 'global_step_3'}",
        ],
    )
    with pytest.raises(ConfigError) as raised:
        check_config(config)
    for name in ("model", "train.parquet", "a.parquet", "b.parquet", "score.py", "global_step_3"):
        assert str(tmp_path / name) in str(raised.value)
    assert "7 problems" in str(raised.value)
    assert "a group of one has no advantage" in str(raised.value)


def test_a_run_needs_prompts_or_a_number_of_steps(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    overrides = [*SOUND, "data.train_files=null", f"actor_rollout_ref.model.path={model}"]
    with pytest.raises(ConfigError, match="the run has no length"):
        check_config(load_config(None, overrides))
    check_config(load_config(None, [*overrides, "trainer.total_training_steps=1"]))


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("config.json", "holds no config.json"),
        ("tokenizer.json", "holds no tokenizer"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, missing: str, named: str) -> None:
    model = make_model(tmp_path / "model")
    (model / missing).unlink()
    overrides = [*SOUND, "data.train_files=null", "trainer.total_training_steps=1"]
    config = load_config(None, [*overrides, f"actor_rollout_ref.model.path={model}"])
    with pytest.raises(ConfigError, match=named):
        check_config(config)
    check_config(config, files=False)
