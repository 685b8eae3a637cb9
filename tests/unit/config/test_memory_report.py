"""What an engine takes, and the guess of a trainer that says what is worth counting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.config.check import EngineReport, engine_problems, engine_report
from sluice.config.loading.loader import load_config
from sluice.config.memory.rollout import rollout_layout
from sluice.config.memory.shape import ModelShape, published_shape
from sluice.config.memory.training import (
    MemoryEstimate,
    TrainingLayout,
    activation_values,
    guessed_memory,
    training_layout,
)
from sluice.config.problems import Problem
from sluice.config.run import RunConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, FSDP = "actor_rollout_ref.model", f"{ACTOR}.fsdp_config"

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
    f"{ROLLOUT}.tensor_model_parallel_size=4",
    f"{ROLLOUT}.gpu_memory_utilization=0.7",
)
SHAPE = published_shape("Qwen3-32B")
HELD = SHAPE.total_parameters / 64
# 1704 parameters: 1192 in layers and last norm, 2 vocabulary matrices of 256; 592 a layer.
TINY = ModelShape(2, 8, 2, 1, 4, 16, 32)


def read(*overrides: str) -> RunConfig:
    return load_config(None, [*LARGE, *overrides])


def report(*overrides: str) -> EngineReport:
    return engine_report(read(*overrides), SHAPE, 64.0)


def too_small(gib: float, *overrides: str) -> list[Problem]:
    return list(engine_problems(read(*overrides), SHAPE, gib))


def guess(*overrides: str) -> MemoryEstimate:
    return guessed_memory(SHAPE, training_layout(read(*overrides)))


def test_an_engine_in_eight_bits_halves_its_weights() -> None:
    plain = report().rollout
    eight = report(f"{ROLLOUT}.quantization=fp8").rollout
    assert eight.weights == plain.weights / 2
    assert rollout_layout(read()).longest_row == 22_528


def test_the_smallest_tensor_parallel_size_needs_a_device() -> None:
    assert report().smallest_tp == 2
    assert engine_report(read(), SHAPE, None).smallest_tp is None


def test_a_device_that_is_too_small_for_an_engine_is_named_and_the_remedy_is_enough() -> None:
    assert too_small(700.0) == []
    one_device = f"{ROLLOUT}.tensor_model_parallel_size=1"
    (found,) = too_small(80.0, one_device)
    assert (found.rule, found.value) == ("engine-memory", 1)
    assert too_small(80.0, one_device, *found.overrides) == []


def test_a_model_that_no_engine_can_hold_has_no_remedy_but_larger_devices() -> None:
    (one,) = too_small(1.0)
    assert one.overrides == ()
    assert "use larger devices" in one.text


def test_a_trainers_state_is_guessed_from_its_shards_dtypes_moments_and_adapters() -> None:
    assert guess().state == 16 * HELD
    assert guess(f"{FSDP}.fsdp_size=16").state == 4 * 16 * HELD
    assert guess(f"{FSDP}.model_dtype=bfloat16", f"{FSDP}.dtype=bfloat16").state == 8 * HELD
    assert guess(f"{FSDP}.optimizer_offload=true").state == 8 * HELD
    half = (f"{FSDP}.optimizer_offload=true", f"{FSDP}.optimizer_offload_fraction=0.5")
    assert guess(*half).state == 12 * HELD
    whole = guess(f"{FSDP}.use_no_sync_for_gradient_accumulation=true")
    assert whole.state == 12 * HELD + 4 * SHAPE.total_parameters
    # A and B of q, k, v, o, gate, up and down.
    ends = 2 * (5120 + 8192) + 2 * (5120 + 1024) + 3 * (5120 + 25_600)
    trained = 16 * 64 * ends / 64
    assert guess(f"{MODEL}.lora_rank=16").state == 2 * HELD + 16 * trained


@pytest.mark.parametrize(
    ("keys", "counts"),
    [
        ((), True),
        ((r"exclude_modules='.*\.experts\..*'",), False),
        (("exclude_modules=[up_proj,gate_proj]",), True),
        (("exclude_modules=[up_proj,gate_proj,down_proj]",), False),
        (("target_modules=[q_proj,v_proj]",), False),
        ((r"target_modules='model\.language_model\..*\.3\..*down_proj'",), True),
        (("target_modules='('",), True),
    ],
)
def test_adapters_of_experts_are_guessed_where_the_keys_name_experts(
    keys: tuple[str, ...], counts: bool
) -> None:
    shape = published_shape("Qwen3-30B-A3B")
    rank, names = f"{MODEL}.lora_rank=16", [f"{MODEL}.{key}" for key in keys]
    state = guessed_memory(shape, training_layout(read(rank, *names))).state
    layout = training_layout(read(rank))
    other = replace(layout, adapts_experts=False)
    assert guessed_memory(shape, other).state < guessed_memory(shape, layout).state
    assert state == guessed_memory(shape, layout if counts else other).state


def test_what_a_pass_leaves_is_guessed_from_its_tokens_and_recomputed_layers() -> None:
    layout = training_layout(read())
    assert layout.micro_tokens == 5632
    fixed = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    assert training_layout(read(*fixed)).micro_tokens == 2 * 22_528 // 4
    # 64 inputs of 5120 values, and 8h + 2Hd + 2KVd + 3(Hd + KVd) + 4I of one layer.
    layer = 8 * 5120 + 5 * 8192 + 5 * 1024 + 4 * 25_600
    assert activation_values(SHAPE) == layer
    gathered = 2 * (SHAPE.vocabulary_parameters + 2 * SHAPE.layer_parameters)
    head = 8 * SHAPE.embedding_parameters
    assert guess().rest == (64 * 5120 + layer) * 5632 * 2 + gathered + head
    kept = guess(f"{MODEL}.enable_gradient_checkpointing=false").rest
    assert kept == 64 * layer * 5632 * 2 + gathered + head


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"reshard_after_forward": False}, 1704 * 2 - (512 + 2 * 592) * 2),
        ({"gathers": False}, -(512 + 2 * 592) * 2),
        ({"activation_offload": True}, 2 * 8 * 10 * 2 - 152 * 10 * 2),
        ({"gradient_checkpointing": True, "recomputed_layers": 1}, 8 * 10 * 2),
        ({"compute_bytes": 4}, (512 + 2 * 592) * 2 + 2 * 152 * 10 * 2),
    ],
)
def test_the_rest_of_a_guess_changes_with_the_layout(
    change: dict[str, int], difference: int
) -> None:
    layout = TrainingLayout(world=4, shard=4, micro_tokens=10)
    plain = guessed_memory(TINY, layout).rest
    assert guessed_memory(TINY, replace(layout, **change)).rest - plain == difference
