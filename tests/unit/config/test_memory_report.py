"""Estimates of a whole configuration, and what they say of a device that is too small."""

from __future__ import annotations

import pytest

from sluice.config.loading.loader import KeySettings, load_config, read_settings
from sluice.config.memory.fit import memory_problems
from sluice.config.memory.layouts import own_training_layout, rollout_layout, verl_training_layout
from sluice.config.memory.published import published_shape
from sluice.config.memory.report import MemoryReport, memory_report
from sluice.config.memory.rollout import GIB
from sluice.config.problems import Problem, Severity
from sluice.config.run import RunConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, MEGATRON = "actor_rollout_ref.model", "actor_rollout_ref.actor.megatron"
FSDP = f"{ACTOR}.fsdp_config"

# Qwen3-32B on 4 machines of 16 devices, sp 4, budget of a quarter of the longest row.
LARGE = (
    "trainer.nnodes=4",
    "trainer.n_gpus_per_node=16",
    "data.max_prompt_length=2048",
    "data.max_response_length=20480",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=5632",
    f"{ACTOR}.ulysses_sequence_parallel_size=4",
    f"{MODEL}.enable_gradient_checkpointing=true",
    f"{FSDP}.param_offload=true",
    f"{FSDP}.optimizer_offload=true",
    f"{ROLLOUT}.tensor_model_parallel_size=4",
    f"{ROLLOUT}.gpu_memory_utilization=0.7",
)
SHAPE = published_shape("Qwen3-32B")


def read(*overrides: str) -> tuple[RunConfig, KeySettings]:
    texts = [*LARGE, *overrides]
    config = load_config(None, texts)
    return config, KeySettings(config, read_settings(None, texts).by_key())


def report(*overrides: str) -> MemoryReport:
    return memory_report(*read(*overrides), SHAPE, 64.0)


def too_small(gib: float, *overrides: str) -> list[Problem]:
    return memory_problems(*read(*overrides), SHAPE, gib)


def test_the_estimate_of_a_large_run_is_what_a_hand_computes() -> None:
    memory = report().training
    parameters = 32_762_123_264
    assert memory.parameters == parameters / 64 * 4
    assert memory.optimizer == parameters / 64 * 8
    assert memory.logits == 5632 * 151_936 * 7
    # 64 inputs of 5120 values, and 8h + 2Hd + 2KVd + 3(Hd + KVd) + 4I of one layer.
    layer = 8 * 5120 + 5 * 8192 + 5 * 1024 + 4 * 25_600
    assert memory.activations == (64 * 5120 + layer) * 5632 * 2
    assert memory.idle == 0
    assert memory.update / GIB == pytest.approx(23.35, abs=0.01)


def test_verls_layout_is_read_from_the_keys_of_fsdp() -> None:
    layout = verl_training_layout(*read(f"{FSDP}.fsdp_size=16", f"{FSDP}.offload_policy=true"))
    assert (layout.backend, layout.world, layout.shard, layout.sp) == ("fsdp", 64, 16, 4)
    assert layout.streamed_offload
    assert layout.param_offload
    assert layout.optimizer_offload
    assert layout.micro_tokens == 5632


def test_rows_of_a_fixed_micro_batch_are_cut_by_sequence_parallelism() -> None:
    fixed = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    config, settings = read(*fixed)
    assert verl_training_layout(config, settings).micro_tokens == 2 * 22_528 // 4
    assert own_training_layout(config).micro_tokens == 2 * 22_528 // 4


def test_verls_layout_is_read_from_the_keys_of_megatron() -> None:
    hybrid = f"+{ACTOR}.optim.override_optimizer_config"
    layout = verl_training_layout(
        *read(
            f"{ACTOR}.strategy=megatron",
            f"{MEGATRON}.tensor_model_parallel_size=4",
            f"{MEGATRON}.pipeline_model_parallel_size=8",
            f"{MEGATRON}.expert_model_parallel_size=2",
            f"{MEGATRON}.grad_offload=true",
            f"+{MEGATRON}.override_transformer_config.recompute_granularity=full",
            f"{hybrid}.optimizer_cpu_offload=true",
            f"{hybrid}.optimizer_offload_fraction=0.5",
        )
    )
    assert (layout.tp, layout.pp, layout.ep, layout.etp) == (4, 8, 2, 4)
    assert layout.grad_offload
    assert not layout.param_offload
    assert layout.gradient_checkpointing
    assert layout.optimizer_host_share == 0.5


def test_verl_checkpoints_by_default() -> None:
    key = f"{MODEL}.enable_gradient_checkpointing"
    assert verl_training_layout(*read(f"~{key}")).gradient_checkpointing
    assert not verl_training_layout(*read(f"{key}=false")).gradient_checkpointing


def test_an_engine_in_eight_bits_halves_its_weights() -> None:
    plain = report().rollout
    eight = report(f"{ROLLOUT}.quantization=fp8").rollout
    assert eight.weights == plain.weights / 2
    assert rollout_layout(read()[0]).longest_row == 22_528


def test_the_smallest_tensor_parallel_size_needs_a_device() -> None:
    assert report().smallest_tp == 2
    assert memory_report(*read(), SHAPE, None).smallest_tp is None


def test_devices_that_are_large_enough_break_no_rule() -> None:
    assert too_small(700.0) == []


@pytest.mark.parametrize(
    ("rule", "gib", "overrides"),
    [
        ("engine-memory", 80.0, [f"{ROLLOUT}.tensor_model_parallel_size=1"]),
        ("update-memory", 30.0, [f"{MODEL}.enable_gradient_checkpointing=false"]),
        ("update-memory", 18.0, []),
        ("update-memory", 16.0, ["trainer.nnodes=1"]),
        ("update-memory", 12.0, ["trainer.nnodes=1"]),
        (
            "colocated-memory",
            24.0,
            [f"{FSDP}.optimizer_offload=false", f"{ROLLOUT}.gpu_memory_utilization=0.9"],
        ),
        (
            "colocated-memory",
            24.0,
            [
                f"{FSDP}.optimizer_offload=false",
                f"{FSDP}.param_offload=false",
                "trainer.nnodes=2",
                f"{ROLLOUT}.tensor_model_parallel_size=4",
                f"{ROLLOUT}.gpu_memory_utilization=0.75",
            ],
        ),
        ("own-update-memory", 130.0, [f"{MODEL}.enable_gradient_checkpointing=false"]),
    ],
)
def test_a_device_that_is_too_small_is_named_and_the_remedy_is_enough(
    rule: str, gib: float, overrides: list[str]
) -> None:
    found = [one for one in too_small(gib, *overrides) if one.rule == rule]
    assert len(found) == 1
    assert found[0].overrides
    mended = too_small(gib, *overrides, *found[0].overrides)
    assert rule not in {one.rule for one in mended}


def test_a_model_that_no_engine_can_hold_has_no_remedy_but_larger_devices() -> None:
    (one,) = [one for one in too_small(1.0) if one.rule == "engine-memory"]
    assert one.overrides == ()
    assert "use larger devices" in one.text


def test_what_our_own_trainer_needs_is_another_rule_than_verls_layout() -> None:
    on_device = (f"{FSDP}.optimizer_offload=false", "actor_rollout_ref.hybrid_engine=false")
    rules = {one.rule: one.severity for one in too_small(23.5, *on_device)}
    assert rules == {"own-update-memory": Severity.ERROR}


def test_our_own_trainer_needs_less_with_moments_on_the_host_and_with_adapters() -> None:
    held = SHAPE.total_parameters / 64
    whole = report(f"{FSDP}.optimizer_offload=false").own_training
    away = report().own_training
    assert whole.update - away.update == 8 * held
    adapted = report(f"{FSDP}.optimizer_offload=false", f"{MODEL}.lora_rank=16").own_training
    # A and B of q, k, v, o, gate, up and down.
    ends = 2 * (5120 + 8192) + 2 * (5120 + 1024) + 3 * (5120 + 25_600)
    trained = 16 * 64 * ends / 64
    assert adapted.parameters == 2 * held + 4 * trained
    assert (adapted.gradients, adapted.optimizer) == (4 * trained, 8 * trained)


def test_a_trainer_of_its_own_devices_leaves_the_engine_alone() -> None:
    overrides = [f"{FSDP}.optimizer_offload=false", f"{ROLLOUT}.gpu_memory_utilization=0.95"]
    apart = too_small(24.0, *overrides, "actor_rollout_ref.hybrid_engine=false")
    assert "colocated-memory" in {one.rule for one in too_small(24.0, *overrides)}
    assert "colocated-memory" not in {one.rule for one in apart}


def test_weights_are_gathered_in_the_dtype_of_the_passes_on_one_rank_too() -> None:
    """FSDP casts shards before it gathers them; of the head, its gradient is held, no logits."""
    one = memory_report(*read("trainer.nnodes=1", "trainer.n_gpus_per_node=1"), SHAPE, 64.0)
    own = one.own_training
    assert own.parameters == 4 * SHAPE.total_parameters
    assert own.gathered == 2 * (SHAPE.vocabulary_parameters + 2 * SHAPE.layer_parameters)
    assert own.logits == 8 * SHAPE.embedding_parameters
