"""Keys of verl's that stand for others set them, unless those are set themselves."""

from __future__ import annotations

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig, value_at
from sluice.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
HOST_OPTIMIZER = f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload"
FILTER, STALENESS = "algorithm.filter_groups", "sluice.asynchrony.max_staleness"


def value(config: RunConfig, key: str) -> object:
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        ([f"{ROLLOUT}.response_length=99"], "data.max_response_length", 99),
        (
            ["data.max_response_length=5", f"{ROLLOUT}.response_length=99"],
            "data.max_response_length",
            99,
        ),
        ([f"{ROLLOUT}.prompt_length=98"], "data.max_prompt_length", 98),
        (
            ["data.train_batch_size=64", f"{FILTER}.max_num_gen_batches=10"],
            f"{FILTER}.min_yield",
            0.1,
        ),
        (
            ["data.train_batch_size=64", f"{FILTER}.max_num_gen_batches=10"],
            f"{FILTER}.min_yield_groups",
            640,
        ),
        (
            [
                "data.train_batch_size=64",
                "data.gen_batch_size=128",
                f"{FILTER}.max_num_gen_batches=10",
            ],
            f"{FILTER}.min_yield",
            0.05,
        ),
        ([f"{FILTER}.max_num_gen_batches=0"], f"{FILTER}.min_yield", 0.0),
        (
            [
                "data.train_batch_size=64",
                "data.gen_batch_size=16",
                f"{FILTER}.max_num_gen_batches=1",
            ],
            f"{FILTER}.min_yield",
            1.0,
        ),
        (
            [f"{ACTOR}.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=8", "trainer.nnodes=2"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            4,
        ),
        (
            ["critic.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=8"],
            "critic.ppo_micro_batch_size_per_gpu",
            8,
        ),
        (["critic.ppo_micro_batch_size=3"], "critic.ppo_micro_batch_size_per_gpu", 3),
        (
            [
                f"{ROLLOUT}.nnodes=2",
                f"{ROLLOUT}.n_gpus_per_node=8",
                f"{ROLLOUT}.tensor_model_parallel_size=4",
            ],
            "sluice.rollout.replicas",
            4,
        ),
        ([f"{ROLLOUT}.nnodes=0"], "sluice.rollout.replicas", 1),
        ([f"{ROLLOUT}.update_weights_bucket_megabytes=512"], "sluice.weights.bucket_mb", 512),
        ([f"{ROLLOUT}.limit_images=3"], "sluice.limits.max_prompt_images", 3),
        ([f"{ROLLOUT}.limit_images=null"], "sluice.limits.max_prompt_images", 16),
        ([f"{ROLLOUT}.checkpoint_engine.backend=nccl"], "sluice.weights.backend", "nccl"),
        ([f"{ROLLOUT}.checkpoint_engine.backend=naive"], "sluice.weights.backend", None),
        (["trainer.v1.trainer_mode=sync"], STALENESS, 0),
        (["trainer.v1.trainer_mode=colocate_async"], STALENESS, 1),
        (["trainer.v1.trainer_mode=separate_async"], STALENESS, 7),
        (
            ["trainer.v1.trainer_mode=separate_async"],
            "sluice.asynchrony.on_stale",
            "drop",
        ),
        (
            [f"{ACTOR}.optim.lr_decay_style=linear"],
            f"{ACTOR}.optim.lr_scheduler_type",
            "linear",
        ),
        (
            [f"{ACTOR}.optim.lr=1e-5", f"{ACTOR}.optim.min_lr=1e-6"],
            f"{ACTOR}.optim.min_lr_ratio",
            0.1,
        ),
        ([f"{ACTOR}.optim.lr_decay_steps=7"], f"{ACTOR}.optim.total_training_steps", 7),
        ([f"{ACTOR}.optim.lr_warmup_steps=null"], f"{ACTOR}.optim.lr_warmup_steps", -1),
        (["critic.optim.lr_warmup_steps=null"], "critic.optim.lr_warmup_steps", -1),
        (["trainer.resume_from_path=''"], "trainer.resume_from_path", None),
        (["trainer.experiment_name=0612"], "trainer.experiment_name", "0612"),
        (["trainer.experiment_name=1128"], "trainer.experiment_name", "1128"),
        (["trainer.project_name=2026"], "trainer.project_name", "2026"),
        (["trainer.rollout_data_dir="], "trainer.rollout_data_dir", None),
        (["trainer.validation_data_dir="], "trainer.validation_data_dir", None),
        (["custom_reward_function.path="], "reward.custom_reward_function.path", None),
        # Without adapters verl does not read their scale.
        (
            ["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_alpha=0"],
            "actor_rollout_ref.model.lora_alpha",
            16,
        ),
        (["actor_rollout_ref.model.lora_alpha=0"], "actor_rollout_ref.model.lora_alpha", 16),
        *(
            ([f"{prefix}.decay_type=cosine"], f"{prefix}.lr_scheduler_type", "cosine")
            for prefix in (f"{ACTOR}.optim", "critic.optim")
        ),
        (
            [
                f"{ROLLOUT}.standalone_gpu_memory_utilization=0.8",
                f"{ROLLOUT}.gpu_memory_utilization=0.4",
            ],
            f"{ROLLOUT}.gpu_memory_utilization",
            0.8,
        ),
        *(
            ([f"critic.{engine}.{name}_offload=true"], f"critic.fsdp.{name}_offload", True)
            for engine in ("veomni", "torchtitan")
            for name in ("param", "optimizer")
        ),
        (["critic.veomni.fsdp_size=4"], "critic.fsdp.fsdp_size", 4),
        (["critic.torchtitan.data_parallel_shard_size=4"], "critic.fsdp.fsdp_size", 4),
        ([f"{ACTOR}.veomni.pad_to_length=true"], f"{ACTOR}.fsdp_config.pad_to_length", True),
        (
            [
                "rollout.total_rollout_steps=6400",
                "data.train_batch_size=64",
                "trainer.total_training_steps=7",
            ],
            "trainer.total_training_steps",
            7,
        ),
        (
            ["rollout.total_rollout_steps=6400", "data.train_batch_size=64"],
            "trainer.total_training_steps",
            100,
        ),
        (["rollout.nnodes=1", "rollout.n_gpus_per_node=4"], "sluice.rollout.replicas", 4),
        *(
            ([f"{ACTOR}.{engine}.{name}_offload=true"], f"{ACTOR}.fsdp_config.{name}_offload", True)
            for engine in ("veomni", "torchtitan")
            for name in ("param", "optimizer")
        ),
        (
            [f"{ACTOR}.megatron.router_replay.mode=R2"],
            f"{ACTOR}.router_replay.mode",
            "R2",
        ),
        (["reward_model.num_workers=5"], "reward.scorer_pool.num_workers", 5),
        (["+reward.timeout=60", "+reward.max_rpm=500"], "reward.scorer_pool.timeout_s", 60),
        (["trainer.remove_previous_ckpt_in_save=true"], "trainer.max_actor_ckpt_to_keep", 1),
        (["+algorithm.scale_rewards=group"], "algorithm.norm_adv_by_std_in_grpo", True),
        (["algorithm.scale_rewards=false"], "algorithm.norm_adv_by_std_in_grpo", False),
    ],
)
def test_a_key_of_verls_sets_ours(overrides: list[str], key: str, expected: object) -> None:
    assert value(load_config(None, overrides), key) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (f"{FILTER}.max_num_gen_batches=10", f"{FILTER}.min_yield=0.5", 0.5),
        ("trainer.v1.trainer_mode=colocate_async", f"{STALENESS}=3", 3),
        ("reward.num_workers=5", "reward.scorer_pool.num_workers=2", 2),
        (f"{ROLLOUT}.nnodes=4", "sluice.rollout.replicas=3", 3),
    ],
)
def test_our_own_key_wins_wherever_it_stands(theirs: str, ours: str, expected: object) -> None:
    key = ours.partition("=")[0]
    assert value(load_config(None, [theirs, ours]), key) == expected
    assert value(load_config(None, [ours, theirs]), key) == expected


@pytest.mark.parametrize("away", [f"{ACTOR}.megatron.optimizer_offload", HOST_OPTIMIZER])
def test_either_of_megatrons_keys_moves_the_optimizer_to_the_host(away: str) -> None:
    both = (f"{ACTOR}.megatron.optimizer_offload", HOST_OPTIMIZER)
    ours = f"{ACTOR}.fsdp_config.optimizer_offload"
    one_of_two = [f"{key}={'true' if key == away else 'false'}" for key in both]
    assert value(load_config(None, one_of_two), ours) is True
    assert value(load_config(None, [*one_of_two, f"{ours}=false"]), ours) is False
    assert value(load_config(None, [f"{key}=false" for key in both]), ours) is False


def test_a_value_that_does_not_fit_after_conversion_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"max_response_length = 0: expected an integer >= 1"):
        load_config(None, [f"{ROLLOUT}.response_length=0"])


@pytest.mark.parametrize(
    ("overrides", "estimator", "loss"),
    [
        (["algorithm.adv_estimator=adpo"], "adpo", "adpo"),
        ([f"{ACTOR}.policy_loss.loss_mode=adpo"], "adpo", "adpo"),
        (
            ["algorithm.adv_estimator=adpo", f"{ACTOR}.policy_loss.loss_mode=vanilla"],
            "adpo",
            "vanilla",
        ),
        (["algorithm.adv_estimator=rloo"], "rloo", "vanilla"),
    ],
)
def test_adpos_estimator_and_its_loss_ask_for_each_other(
    overrides: list[str], estimator: str, loss: str
) -> None:
    config = load_config(None, overrides)
    found = config.actor_rollout_ref.actor.policy_loss.loss_mode
    assert (config.algorithm.adv_estimator, found) == (estimator, loss)


def test_megatrons_adapters_are_named_by_this_models_layers_with_megatrons_defaults() -> None:
    block = "actor_rollout_ref.model.lora"
    model = load_config(None, [f"{block}.rank=8"]).actor_rollout_ref.model
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 32.0, layers)
    assert model.exclude_modules is None
    chosen = [f"{block}.rank=8", f"{block}.alpha=16", f"{block}.target_modules=[linear_fc2,mine]"]
    model = load_config(None, chosen).actor_rollout_ref.model
    assert (model.lora_alpha, model.target_modules) == (16.0, ["down_proj", "mine"])
    off = load_config(None, [f"{block}.rank=0", f"{block}.alpha=64"]).actor_rollout_ref.model
    assert (off.lora_rank, off.lora_alpha) == (0, 16.0)


def test_without_any_key_nothing_is_converted() -> None:
    assert value_at({"a": {"b": 1}}, ["a", "b"], None) == 1
    assert load_config(None, ["data.seed=null"]) == RunConfig()
