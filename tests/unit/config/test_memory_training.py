"""Memory of a trainer device against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import TrainingLayout, activation_values, training_memory

# 1704 parameters: 1192 in layers and last norm, 2 vocabulary matrices of 256; 592 a layer.
SHAPE = ModelShape(2, 8, 2, 1, 4, 16, 32)
EXPERTS = replace(SHAPE, experts=4, experts_per_token=2, expert_intermediate=6)
FSDP = TrainingLayout(backend="fsdp", world=4, shard=4, micro_tokens=10)
MEGATRON = TrainingLayout(backend="megatron", world=8, tp=2, pp=2, micro_tokens=10)


def test_fsdp_shards_sixteen_bytes_a_parameter() -> None:
    memory = training_memory(SHAPE, FSDP)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (1704, 1704, 3408)
    halves = training_memory(SHAPE, replace(FSDP, shard=2))
    assert (halves.parameters, halves.optimizer) == (3408, 6816)


def test_fsdp_gathers_the_vocabulary_and_two_layers_in_the_compute_dtype() -> None:
    assert training_memory(SHAPE, FSDP).gathered == (512 + 2 * 592) * 2
    whole = training_memory(SHAPE, replace(FSDP, reshard_after_forward=False))
    assert whole.gathered == 1704 * 2


def test_a_layer_keeps_the_values_its_backward_pass_needs() -> None:
    # Two norms 64, queries and output 16, keys and values 8, four times the MLP's width 64.
    assert activation_values(SHAPE) == 152
    # Normalised heads 3·(8 + 4); two experts of 6 instead of 16, and 2·2 copies of the 8 values.
    assert activation_values(replace(SHAPE, qk_norm=True)) == 188
    assert activation_values(EXPERTS) == 64 + 24 + 4 * 12 + 32


def test_checkpointing_keeps_each_layers_input_and_one_layer() -> None:
    assert training_memory(SHAPE, FSDP).activations == 2 * 152 * 10 * 2
    kept = training_memory(SHAPE, replace(FSDP, gradient_checkpointing=True))
    assert kept.activations == 2 * 8 * 10 * 2 + 152 * 10 * 2
    away = training_memory(SHAPE, replace(FSDP, activation_offload=True))
    assert away.activations == 2 * 8 * 10 * 2 + 152 * 10 * 2


def test_logits_take_seven_bytes_unless_they_are_fused_away() -> None:
    assert training_memory(SHAPE, FSDP).logits == 10 * 32 * 7
    assert training_memory(SHAPE, replace(FSDP, fused_logits=True)).logits == 0


def test_the_updates_peak_holds_everything() -> None:
    layout = replace(FSDP, gradient_checkpointing=True)
    assert training_memory(SHAPE, layout).update == 6816 + 3392 + 3360 + 2240


def test_phase_offloads_empty_the_device_between_updates_but_not_during_one() -> None:
    loaded = training_memory(SHAPE, FSDP)
    away = training_memory(SHAPE, replace(FSDP, param_offload=True, optimizer_offload=True))
    assert (loaded.idle, loaded.host) == (1704 + 3408, 0)
    assert (away.idle, away.host) == (0, 1704 + 3408)
    assert away.update == loaded.update
    assert loaded.log_prob - away.log_prob == 3408


def test_streaming_keeps_all_model_state_on_the_host() -> None:
    memory = training_memory(SHAPE, replace(FSDP, streamed_offload=True))
    assert memory.update == memory.gathered + memory.activations + memory.logits
    assert memory.host == 16 * 1704 / 4


def test_megatron_cuts_by_tensor_and_stage_and_shards_only_the_optimizer() -> None:
    memory = training_memory(SHAPE, MEGATRON)
    held = 1192 / 4 + 256 / 2
    assert memory.parameters == 2 * held
    assert memory.gradients == 4 * held
    assert memory.optimizer == 12 * held / 2
    assert memory.logits == 10 * 32 * 7 / 2


def test_the_first_stage_keeps_micro_batches_of_all_stages() -> None:
    one_stage = training_memory(SHAPE, replace(MEGATRON, pp=1))
    assert training_memory(SHAPE, MEGATRON).activations == one_stage.activations


def test_a_stage_alone_holds_both_vocabulary_matrices() -> None:
    memory = training_memory(SHAPE, replace(MEGATRON, pp=1))
    assert memory.parameters == 2 * (1192 + 512) / 2


def test_experts_are_cut_by_their_own_sizes() -> None:
    memory = training_memory(EXPERTS, replace(MEGATRON, ep=4))
    dense, experts = 488 / 4 + 256 / 2, 1152 / 2 / 4
    assert memory.parameters == 2 * (dense + experts)
    # 8 ranks: 2 copies of the dense part of a stage, 8 / (ep 4 · pp 2) = 1 of its experts.
    assert memory.optimizer == 12 * (dense / 2 + experts)


def test_megatron_frees_gradient_buffers_only_on_request() -> None:
    kept = training_memory(SHAPE, MEGATRON)
    freed = training_memory(SHAPE, replace(MEGATRON, grad_offload=True))
    assert kept.idle - freed.idle == kept.gradients == freed.host


def test_the_hybrid_optimizer_lowers_the_updates_peak() -> None:
    whole, hybrid = (
        training_memory(SHAPE, replace(MEGATRON, optimizer_host_share=share)) for share in (0, 0.75)
    )
    assert hybrid.optimizer == whole.optimizer / 4
    assert whole.update - hybrid.update == hybrid.host == 0.75 * whole.optimizer


def test_a_replicated_trainer_holds_the_whole_model_on_each_rank() -> None:
    memory = training_memory(SHAPE, TrainingLayout("replicated", world=4, micro_tokens=10))
    assert memory.parameters + memory.gradients + memory.optimizer == 16 * 1704
    assert memory.gathered == 0


@given(
    world=st.sampled_from([1, 2, 4, 8]),
    tokens=st.integers(1, 10_000),
    checkpointing=st.booleans(),
)
def test_more_ranks_never_need_more_memory_and_more_tokens_never_less(
    world: int, tokens: int, checkpointing: bool
) -> None:
    layout = TrainingLayout(
        "fsdp",
        world,
        micro_tokens=tokens,
        shard=world,
        gradient_checkpointing=checkpointing,
    )
    memory = training_memory(SHAPE, layout)
    wider = training_memory(SHAPE, replace(layout, world=2 * world, shard=2 * world))
    longer = training_memory(SHAPE, replace(layout, micro_tokens=tokens + 1))
    assert wider.update < memory.update < longer.update
    assert memory.idle <= memory.log_prob <= memory.update + memory.layer_activations


def test_sequence_parallelism_divides_what_depends_on_tokens() -> None:
    layout = replace(FSDP, gradient_checkpointing=True)
    whole = training_memory(SHAPE, layout)
    tokens = -(-layout.micro_tokens * layout.sp // 2)
    halved = training_memory(SHAPE, replace(layout, sp=2, micro_tokens=tokens))
    assert halved.activations == pytest.approx(whole.activations / 2)
    assert halved.logits == pytest.approx(whole.logits / 2)
    assert halved.parameters == whole.parameters
