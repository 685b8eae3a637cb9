"""Every accepted spelling of a key is the same key, in files and in overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def loaded(folder: Path, text: str, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reward_model.reward_manager=naive", "reward.reward_manager.name=naive"),
        ("reward_model.reward_manager.name=naive", "reward.reward_manager.name=naive"),
        ("reward.reward_manager=naive", "reward.reward_manager.name=naive"),
        (
            "reward_model.overlong_buffer.len=7",
            "reward.reward_kwargs.overlong_buffer_cfg.len=7",
        ),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=7",
            "reward.reward_kwargs.overlong_buffer_cfg.len=7",
        ),
        (
            "+reward.reward_kwargs.overlong_buffer_cfg.len=7",
            "reward.reward_kwargs.overlong_buffer_cfg.len=7",
        ),
        ("+reward_model.reward_kwargs.max_resp_len=9", "reward.reward_kwargs.max_resp_len=9"),
        ("+reward.reward_kwargs.max_resp_len=9", "reward.reward_kwargs.max_resp_len=9"),
        ("custom_reward_function.name=f", "reward.custom_reward_function.name=f"),
        (
            "+custom_reward_function.reward_kwargs.strict=true",
            "reward.custom_reward_function.reward_kwargs={strict: true}",
        ),
        (f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type=cosine"),
        (f"+{ACTOR}.optim.override_optimizer_config.eps=1e-15", f"{ACTOR}.optim.eps=1e-15"),
        (
            f"+{ACTOR}.optim.override_optimizer_config={{betas: [0.9, 0.95], weight_decay: 0.2}}",
            f"{ACTOR}.optim={{betas: [0.9, 0.95], weight_decay: 0.2}}",
        ),
        ("critic.optim.override_optimizer_config.lr=3e-6", "critic.optim.lr=3e-6"),
        (f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=0.5"),
        ("critic.grad_clip=0.5", "critic.optim.clip_grad=0.5"),
        ("+critic.optim.grad_clip=0.5", "critic.optim.clip_grad=0.5"),
        (
            "critic.model.fsdp_config.model_dtype=bfloat16",
            "critic.fsdp.model_dtype=bfloat16",
        ),
        (f"{ACTOR}.policy_loss.num_generations=4", "algorithm.num_generations=4"),
        ("algorithm.beta_reward=0.3", f"{ACTOR}.policy_loss.beta_reward=0.3"),
        ("reward_model.model.path=judge", "reward.reward_model.model_path=judge"),
        (
            "reward_model={reward_manager: naive, overlong_buffer: {len: 3}}",
            "reward={reward_manager: {name: naive}, "
            "reward_kwargs: {overlong_buffer_cfg: {len: 3}}}",
        ),
    ],
)
def test_an_old_spelling_sets_the_same_key(old: str, new: str) -> None:
    assert load_config(None, [old]) == load_config(None, [new])
    assert load_config(None, [old]) != RunConfig()


def test_old_spellings_in_a_file_give_way_to_new_ones_in_overrides(tmp_path: Path) -> None:
    text = "reward_model: {reward_manager: naive, overlong_buffer: {enable: true, len: 5}}\n"
    config = loaded(tmp_path, text, "reward.reward_kwargs.overlong_buffer_cfg.len=6")
    assert config.reward.reward_manager.name == "naive"
    assert config.reward.reward_kwargs.overlong_buffer_cfg.enable
    assert config.reward.reward_kwargs.overlong_buffer_cfg.len == 6


def test_of_two_spellings_in_overrides_the_later_wins() -> None:
    pair = [f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=2.0"]
    assert load_config(None, pair).actor_rollout_ref.actor.optim.clip_grad == 2.0
    assert load_config(None, pair[::-1]).actor_rollout_ref.actor.optim.clip_grad == 0.5


def test_two_spellings_with_two_values_in_one_file_are_refused(tmp_path: Path) -> None:
    text = "critic: {grad_clip: 0.5, optim: {clip_grad: 2.0}}\n"
    with pytest.raises(ConfigError, match=r"critic.optim.clip_grad = 2 are one key; keep one"):
        loaded(tmp_path, text)
    loaded(tmp_path, "reward_model: {rollout: {x: 1}}\nreward: {reward_model: {rollout: {x: 2}}}\n")
    agreed = loaded(tmp_path, "critic: {grad_clip: 0.5, optim: {clip_grad: 0.5}}\n")
    assert agreed.critic.optim.clip_grad == 0.5


def test_of_two_keys_that_are_one_here_one_may_refer_to_the_other(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n"
        "  model: {use_fused_kernels: true}\n"
        "  actor:\n"
        "    use_fused_kernels: ${oc.select:actor_rollout_ref.model.use_fused_kernels,false}\n"
        "    grad_clip: ${actor_rollout_ref.actor.optim.clip_grad}\n"
        "    optim: {clip_grad: 0.25}\n"
        "    pad_to_length: true\n"
        "    fsdp_config:\n"
        "      pad_to_length: ${oc.select:actor_rollout_ref.actor.pad_to_length,false}\n"
    )
    assert loaded(tmp_path, text).actor_rollout_ref.actor.optim.clip_grad == 0.25
    alone = "critic: {grad_clip: '${critic.optim.clip_grad}'}\n"
    assert loaded(tmp_path, alone) == RunConfig()


def test_the_manager_of_verl_0_7_may_refer_to_the_older_key(tmp_path: Path) -> None:
    select = "${oc.select:reward_model.reward_manager,naive}"
    text = f"reward_manager: {{name: '{select}', source: register, module: {{path: null}}}}\n"
    older = f"{text}reward_model: {{reward_manager: dapo}}\n"
    assert loaded(tmp_path, older).reward.reward_manager.name == "dapo"
    assert loaded(tmp_path, text).reward.reward_manager.name == "dapo"  # sluice's default
    assert loaded(tmp_path, "reward_manager: {name: naive}\n").reward.reward_manager.name == "naive"


def test_a_reference_to_its_own_section_is_a_circle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"circle: critic\.ppo_epochs -> critic"):
        loaded(tmp_path, "critic: {ppo_epochs: '${critic}'}\n")


def test_a_null_in_an_old_spelling_leaves_the_key_alone(tmp_path: Path) -> None:
    text = "reward: {num_workers: 3}\nreward_model: {num_workers: null, reward_manager: null}\n"
    assert loaded(tmp_path, text).reward.scorer_pool.num_workers == 3


def test_what_hydra_writes_into_files_is_passed_over(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n"
        "  actor: {_target_: verl.workers.config.FSDPActorConfig, ppo_epochs: 2}\n"
        "  rollout:\n"
        "    name: ???\n"
        "    n: 4\n"
    )
    config = loaded(tmp_path, text)
    assert config.actor_rollout_ref.actor.ppo_epochs == 2
    assert (config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.n) == (
        "torch",
        4,
    )


def test_references_may_be_relative_select_and_use_old_spellings(tmp_path: Path) -> None:
    text = (
        "critic:\n"
        "  ppo_max_token_len_per_gpu: 777\n"
        "  ppo_epochs: ${.ppo_max_token_len_per_gpu}\n"
        "  ppo_mini_batch_size: ${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,1}\n"
        "  loss_scale_factor: ${oc.select:nothing.here,${oc.select:nor.there,12}}\n"
        "reward_model: {overlong_buffer: {len: 9}}\n"
        "trainer: {project_name: 'w${reward_model.overlong_buffer.len}'}\n"
        "data: {val_max_samples: '${trainer.esi_redundant_time}'}\n"
    )
    config = loaded(tmp_path, text)
    assert config.critic.ppo_epochs == 777
    assert config.critic.ppo_mini_batch_size == 256
    assert config.critic.loss_scale_factor == 12
    assert config.trainer.project_name == "w9"
    assert config.data.val_max_samples == 0


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        (f"{ACTOR}.fsdp_config.model_dtype=fp32", "model_dtype", "float32"),
        (f"{ACTOR}.fsdp_config.model_dtype=bf16", "model_dtype", "bfloat16"),
    ],
)
def test_short_names_of_dtypes_are_understood(written: str, key: str, value: str) -> None:
    config = load_config(None, [written])
    assert getattr(config.actor_rollout_ref.actor.fsdp_config, key) == value


def test_words_of_verl_for_loggers_managers_and_retention_are_understood() -> None:
    config = load_config(
        None,
        [
            "trainer.logger=['console','vemlp_wandb','file']",
            "reward_model.reward_manager=prime",
            "trainer.max_actor_ckpt_to_keep=-1",
            "algorithm.filter_groups.metric=null",
            f"{ROLLOUT}.quantization=false",
        ],
    )
    assert config.trainer.logger == ["console", "wandb", "jsonl"]
    assert config.reward.reward_manager.name == "naive"
    assert config.trainer.max_actor_ckpt_to_keep is None
    assert config.algorithm.filter_groups.metric == "acc"
    assert config.actor_rollout_ref.rollout.quantization is None


def test_the_symmetric_clip_counts_only_where_a_bound_is_null() -> None:
    actor = load_config(
        None, [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=null"]
    ).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.2)


def test_a_path_may_start_at_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    config = load_config(
        None, ["data.train_files=['~/a.parquet','b.parquet']", "actor_rollout_ref.model.path=~/m"]
    )
    assert config.data.train_files == ["/users/me/a.parquet", "b.parquet"]
    assert config.actor_rollout_ref.model.path == "/users/me/m"
    played = load_config(None, ["sluice.environment.path=~/e.py"])
    assert played.sluice.environment.path == "/users/me/e.py"
