"""Relations between fields that keep sluice from running, and files that must exist."""

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
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
JUDGE = "reward.reward_model"
SHAPING = "reward.reward_kwargs.overlong_buffer_cfg"


def problems(*overrides: str) -> list[str]:
    return relation_problems(load_config(None, [*SOUND, *overrides]))


def test_a_sound_configuration_has_no_problem() -> None:
    assert problems() == []


@pytest.mark.parametrize("loss_mode", ["cispo", "dppo_tv", "dppo_kl", "geo_mean", "kl_cov"])
def test_a_loss_without_a_lower_bound_on_the_ratio_takes_any_clip_ratio_low(loss_mode: str) -> None:
    assert (
        problems(f"{ACTOR}.policy_loss.loss_mode={loss_mode}", f"{ACTOR}.clip_ratio_low=10") == []
    )


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "clip_cov"])
def test_a_lower_bound_of_the_ratio_must_be_positive(loss_mode: str) -> None:
    found = problems(f"{ACTOR}.policy_loss.loss_mode={loss_mode}", f"{ACTOR}.clip_ratio_low=1.0")
    assert any("1 - clip_ratio_low, must be positive" in one for one in found)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([f"{ACTOR}.ppo_mini_batch_size=128"], "is more than data.train_batch_size = 64"),
        ([f"{ACTOR}.ppo_mini_batch_size=24"], "is no multiple of"),
        (["trainer.n_gpus_per_node=512"], "leaves some of 512 trainer ranks without work"),
        ([f"~{ACTOR}.ppo_micro_batch_size_per_gpu"], "use_dynamic_bsz is false"),
        (
            [f"{ROLLOUT}.n=1", "algorithm.adv_estimator=rloo_vectorized"],
            "a group of one has no advantage",
        ),
        (
            [f"{ROLLOUT}.n=300"],
            "is more than sluice.rollout.max_n = 256",
        ),
        ([f"{ROLLOUT}.val_kwargs.n=300"], "val_kwargs.n = 300 is more than"),
        (
            [f"{ROLLOUT}.n=8", f"{ROLLOUT}.max_num_seqs=4", "sluice.rollout.max_queued=3"],
            "n = 8 is more than a replica takes: actor_rollout_ref.rollout.max_num_seqs = 4 and "
            "sluice.rollout.max_queued = 3 waiting",
        ),
        (["algorithm.adv_estimator=gae2"], "algorithm.adv_estimator = 'gae2' is unknown"),
        ([f"{ACTOR}.policy_loss.loss_mode=best"], "loss_mode = 'best' is unknown"),
        (["trainer.device=tpu"], "trainer.device = 'tpu' is unknown; known: cpu, cuda, npu"),
        ([f"{ROLLOUT}.max_model_len=1000"], "set it to at least 1024, or to null"),
        ([f"{ROLLOUT}.top_k=-3"], "top_k = -3: expected -1 (off) or at least 1"),
        ([f"{ROLLOUT}.val_kwargs.top_k=-2"], "val_kwargs.top_k = -2"),
        ([f"{ACTOR}.optim.betas=[0.9,1.0]"], "expected two numbers in [0, 1)"),
        ([f"{ACTOR}.clip_ratio=0.3"], "clip_ratio = 0.3 has no effect"),
        ([f"{ACTOR}.use_rollout_log_probs=true"], "set one of the two"),
        (["sluice.reward.endpoint.host=0.0.0.0"], "no address that peers can reach"),
        ([f"{ACTOR}.loss_scale_factor=0"], "loss_scale_factor = 0"),
        ([f"{SHAPING}.enable=true", f"{SHAPING}.penalty_factor=1"], "len = 0: expected 1 to"),
        ([f"{SHAPING}.enable=true", f"{SHAPING}.len=8"], "penalty_factor = 0 would have no effect"),
        (
            [
                f"{SHAPING}.enable=true",
                f"{SHAPING}.len=8",
                f"{SHAPING}.penalty_factor=1",
                "reward.reward_manager.name=naive",
            ],
            "use the manager dapo",
        ),
        (["algorithm.rollout_correction.rollout_is=null"], "nothing corrects for samples"),
        (["trainer.test_freq=5"], "there is nothing to validate on"),
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["trainer.resume_from_path=x"], "has no effect with trainer.resume_mode = auto"),
        (
            ["sluice.reward.endpoint.port=7000", "sluice.trainer.endpoint.port=7000"],
            "taken by sluice.reward.endpoint",
        ),
        (
            ["sluice.rollout.endpoint.port=7000", "sluice.rollout.replicas=2"],
            "all replicas would take one port",
        ),
        (
            ["sluice.rollout.endpoint.health_port=8080", "sluice.rollout.replicas=2"],
            "health_port = 8080 with sluice.rollout.replicas = 2: all replicas would take one port",
        ),
        (
            ["sluice.reward.endpoint.health_port=8080", "sluice.rollout.endpoint.health_port=8080"],
            "health_port = 8080 taken by sluice.reward.endpoint.health_port; give each",
        ),
        (
            ["sluice.reward.endpoint.health_port=7000", "sluice.trainer.endpoint.port=7000"],
            "sluice.trainer.endpoint.port = 7000 taken by sluice.reward.endpoint.health_port",
        ),
        (
            ["sluice.reward.endpoint.health_port=7000", "sluice.reward.endpoint.port=7000"],
            "health_port = 7000 taken by sluice.reward.endpoint.port",
        ),
        (["sluice.watchdog.stall_s=0.5"], "stall_s = 0.5: a healthy service pauses"),
        (["sluice.watchdog.stall_s=1800"], "stall_s = 1800 is not below give_up_s = 1800"),
        (["sluice.trainer.replica_ttl_s=1.5"], "is less than two heartbeats"),
        (["sluice.trainer.replica_stall_s=1.5"], "replica_stall_s = 1.5 is less than two heart"),
        (["sluice.rollout.drain_timeout_s=60"], "a draining replica would be killed"),
        (["sluice.max_message_mb=3"], "is less than the 4 MiB a train batch of 512 rows can reach"),
        (["data.max_response_length=350000"], "are more than a message can hold (2047 MiB)"),
        (["trainer.val_only=true"], "there is nothing to validate on; give val_files"),
        (
            ["trainer.val_only=true", "trainer.val_before_train=false", "data.val_files=v.parquet"],
            "would do nothing; set val_before_train=true",
        ),
        (["reward_model.enable=true", f"{JUDGE}.model_path=m"], "base_url = null: sluice starts"),
        (
            ["reward_model.enable=true", f"{JUDGE}.base_url=u"],
            "model_path = null: give",
        ),
        ([f"{JUDGE}.min_score=2"], "min_score = 2 is above max_score = 1"),
    ],
)
def test_a_contradiction_is_named_with_its_remedy(overrides: list[str], named: str) -> None:
    found = problems(*overrides)
    assert len(found) == 1
    assert named in found[0]


@pytest.mark.parametrize(
    "overrides",
    [
        # verl would refuse each; the rows of a rank may differ here, and a row longer than the
        # budget gets a micro-batch of its own.
        ["trainer.n_gpus_per_node=3"],
        [f"{ACTOR}.ppo_micro_batch_size_per_gpu=7"],
        [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1023"],
    ],
)
def test_what_only_verl_refuses_does_not_keep_a_run_from_starting(overrides: list[str]) -> None:
    assert problems(*overrides) == []


def test_a_message_is_as_large_as_a_train_batch_can_be_unless_told_otherwise() -> None:
    long = "data.max_response_length=20480"
    assert problems(long) == []
    assert derived.message_mb(load_config(None, [*SOUND])) == 64
    assert derived.message_mb(load_config(None, [*SOUND, long])) == 121
    assert derived.message_mb(load_config(None, [*SOUND, long, "sluice.max_message_mb=9"])) == 9


def test_the_filter_needs_groups_of_two_with_any_estimator() -> None:
    config = load_config(None, [*SOUND, f"{ROLLOUT}.n=1", "algorithm.filter_groups.enable=true"])
    assert any("set n to 2 or more" in problem for problem in relation_problems(config))


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
    with pytest.raises(ConfigError, match="so the run has no length"):
        check_config(load_config(None, overrides))
    check_config(load_config(None, [*overrides, "trainer.total_training_steps=1"]))


@pytest.mark.parametrize(
    ("missing", "named"),
    [("config.json", "it is no Hugging Face model"), ("tokenizer.json", "holds no tokenizer")],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, missing: str, named: str) -> None:
    model = make_model(tmp_path / "model")
    (model / missing).unlink()
    overrides = [*SOUND, "data.train_files=null", "trainer.total_training_steps=1"]
    config = load_config(None, [*overrides, f"actor_rollout_ref.model.path={model}"])
    with pytest.raises(ConfigError, match=named):
        check_config(config)
    check_config(config, files=False)
