"""Launches as users of verl wrote them load unchanged, and break no rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sluice.config.catalogue.table import KeyStatus
from sluice.config.explain import key_statuses, notices
from sluice.config.loading.loader import KeySettings, load_config, read_settings, settings_of
from sluice.config.memory.shape import published_shape
from sluice.config.problems import Problem
from sluice.config.rules.checks import all_problems
from sluice.config.run import RunConfig
from sluice.config.verl_sizes import verl_batch
from sluice.errors import ConfigError

LAUNCHES = Path(__file__).resolve().parents[2] / "data" / "launches"
FILES = sorted(LAUNCHES.glob("*.overrides"))
NAMES = [path.stem for path in FILES]


def load(name: str) -> RunConfig:
    return load_config(None, [f"@{LAUNCHES / name}.overrides"])


def reported(name: str) -> dict[str, Problem]:
    settings = read_settings(LAUNCHES / f"{name}.overrides", [])
    return {one.key: one for one in notices(settings)}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_launch_loads_and_most_of_its_keys_are_honoured(path: Path) -> None:
    load_config(path, [])
    found = Counter(key_statuses(read_settings(path, [])).values())
    assert found[KeyStatus.REFUSED] == 0
    assert found[KeyStatus.HONOURED] > found[KeyStatus.NOT_APPLICABLE]


def test_the_settings_of_dapo_arrive_in_our_keys() -> None:
    config = load("dapo-qwen3-32b-fsdp2-npu")
    actor, shaping = config.actor_rollout_ref.actor, config.reward.reward_kwargs
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (actor.optim.lr, actor.optim.lr_warmup_steps, actor.optim.weight_decay) == (
        1e-6,
        10,
        0.1,
    )
    assert actor.optim.clip_grad == 1.0
    assert config.reward.reward_manager.name == "dapo"
    assert shaping.overlong_buffer_cfg.enable
    assert shaping.overlong_buffer_cfg.len == 4096
    assert shaping.overlong_buffer_cfg.penalty_factor == 1.0
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4
    assert config.trainer.device == "npu"
    assert not config.trainer.val_before_train
    assert config.trainer.logger == ["console"]


def test_rounds_of_generation_become_a_least_yield() -> None:
    # 10 rounds of 256 prompts for 128 groups.
    groups = load("dapo-qwen3-235b-megatron").algorithm.filter_groups
    assert (groups.min_yield, groups.min_yield_groups) == (0.05, 2560)


def test_a_function_of_the_user_and_the_divergence_arrive() -> None:
    config = load("dapo-qwen3-8b-dianjin-npu")
    actor = config.actor_rollout_ref.actor
    assert config.reward.custom_reward_function.name == "compute_score"
    assert config.reward.custom_reward_function.path == "/path/to/reward_score.py"
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (
        True,
        0.001,
        "low_var_kl",
    )
    assert config.trainer.max_critic_ckpt_to_keep == 2
    assert config.trainer.test_freq == -100


def test_one_logger_needs_no_list_and_recent_names_are_ours() -> None:
    config = load("dapo-qwen3-vl-30b-fsdp2-npu")
    assert config.trainer.logger == ["console"]
    assert config.reward.reward_kwargs.max_resp_len == 2048
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"mm_processor_cache_gb": 0}}


def test_adpo_is_asked_for_by_its_own_keys() -> None:
    algorithm = load("adpo-4x4090").algorithm
    assert (algorithm.adv_estimator, algorithm.num_generations) == ("adpo", 8)


def test_notices_name_what_has_no_effect_and_what_was_turned_into_something_else() -> None:
    found = reported("dapo-qwen3-235b-megatron")
    parallel = found["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"]
    assert parallel.rule == KeyStatus.MAPPED
    assert parallel.text.endswith("= 4 is read as fsdp_config.tensor_parallel_size")
    old = found["reward_model.overlong_buffer.len"]
    assert old.rule == KeyStatus.MAPPED
    assert old.text.endswith("is read as reward.reward_kwargs.overlong_buffer_cfg.len")
    assert "actor_rollout_ref.actor.megatron.context_parallel_size" not in found
    experts = found["actor_rollout_ref.actor.megatron.expert_model_parallel_size"]
    assert experts.text.endswith("= 4 is read as fsdp_config.expert_parallel_size")


@pytest.mark.parametrize(("engine", "is_named"), [("torch", True), ("vllm", False)])
def test_what_tunes_another_engine_is_named(engine: str, is_named: bool) -> None:
    key = "actor_rollout_ref.rollout"
    tuned = [f"{key}.name={engine}", f"{key}.enforce_eager=false", f"+{key}.engine_kwargs.vllm.x=1"]
    overrides = [*tuned, f"{key}.gpu_memory_utilization=0.8"]
    found = notices(settings_of({}, overrides))
    texts = [one.text for one in found]
    assert len(texts) == (2 if is_named else 0)
    assert all("it tunes vllm and sglang, and" in text for text in texts)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("tainer.device=npu", "trainer.device"),
        ("al" + "ogorithm.gamma=1", "algorithm.gamma"),
        (
            "algorithm.filter_groups.max_num_batches=10",
            "algorithm.filter_groups.max_num_gen_batches",
        ),
        ("reward_model.overlong_bufer.len=4096", "reward_model.overlong_buffer.len"),
        ("+actor_rollout_ref.rolout.n=8", "actor_rollout_ref.rollout.n"),
    ],
)
def test_slips_of_the_guides_are_errors_that_name_what_was_meant(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key; did you mean {meant}\?"):
        load_config(None, [typo])


DATA_PARALLEL = {
    "adpo-4x4090": 4,
    "dapo-qwen3-235b-megatron": 4,
    "dapo-qwen3-32b-fsdp2-npu": 16,
    "dapo-qwen3-8b-dianjin-npu": 16,
    "dapo-qwen3-vl-30b-fsdp2-npu": 16,
    "grpo-8xa100": 8,
    "grpo-qwen2.5-7b-megatron-kl": 2,
}


def test_every_launch_is_looked_at() -> None:
    assert {file.stem for file in LAUNCHES.glob("*.overrides")} == set(DATA_PARALLEL)


TRUNCATED = "sluice.sampling.train_truncated=true"
NEEDED = {"dapo-qwen3-8b-dianjin-npu": [TRUNCATED]}
"""What a launch has to say here beyond its document: one trains with top_p = 0.95."""


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_a_published_launch_breaks_no_rule(name: str) -> None:
    file, more = LAUNCHES / f"{name}.overrides", NEEDED.get(name, [])
    config = load_config(file, more)
    settings = KeySettings(config, read_settings(file, more).by_key())
    model = config.actor_rollout_ref.model.path.rpartition("/")[2]
    shape = published_shape(model) if model else None
    broken = all_problems(config, settings, shape=shape, files=False)
    assert [one for one in broken if one.rule != "engine-replicas"] == []
    assert verl_batch(config, settings).split.data_parallel == DATA_PARALLEL[name]
