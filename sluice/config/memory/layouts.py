"""Read the layouts of trainer and engine from the configuration."""

from __future__ import annotations

from sluice.config.derived import adapts_experts, is_whole, max_row_tokens, world_size
from sluice.config.memory.rollout import RolloutLayout
from sluice.config.memory.training import TrainingLayout
from sluice.config.run import RunConfig

_BYTES = {"float32": 4, "bfloat16": 2}


def training_layout(config: RunConfig) -> TrainingLayout:
    """Return the trainer: ``fsdp_size`` ranks of each tensor index share."""
    world, sharding = world_size(config), config.actor_rollout_ref.actor.fsdp_config
    model, megatron = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.megatron
    recompute = megatron.override_transformer_config
    granularity, is_block = recompute.recompute_granularity, recompute.recompute_method == "block"
    tensor = sharding.tensor_parallel_size
    peers = max(1, world // (tensor * sharding.pipeline_parallel_size))
    shard = tensor * (sharding.fsdp_size if 0 < sharding.fsdp_size < peers else peers)
    whole = is_whole(sharding, shard)
    return TrainingLayout(
        world=world,
        shard=1 if whole else shard,
        gathers=not whole,
        reshard_after_forward=sharding.reshard_after_forward,
        whole_gradients=sharding.use_no_sync_for_gradient_accumulation
        or sharding.pipeline_parallel_size > 1,
        tensor=tensor,
        pipeline=sharding.pipeline_parallel_size,
        ep=sharding.expert_parallel_size,
        micro_tokens=_micro_tokens(config, ranks=sharding.ulysses_sequence_parallel_size),
        master_bytes=_BYTES[sharding.model_dtype],
        compute_bytes=_BYTES[sharding.dtype],
        gradient_checkpointing=granularity == "full"
        or (granularity is None and model.enable_gradient_checkpointing),
        recomputed_layers=recompute.recompute_num_layers
        if granularity == "full" and is_block
        else None,
        activation_offload=model.enable_activation_offload,
        moments_on_device=1 - sharding.optimizer_offload_fraction * sharding.optimizer_offload,
        adapter_rank=model.lora_rank,
        adapts_experts=adapts_experts(model),
    )


def rollout_layout(config: RunConfig) -> RolloutLayout:
    """Return the inference engine."""
    rollout = config.actor_rollout_ref.rollout
    return RolloutLayout(
        tp=rollout.tensor_model_parallel_size,
        ep=rollout.expert_parallel_size,
        utilization=rollout.gpu_memory_utilization,
        weight_bytes=1 if rollout.quantization == "fp8" else _BYTES[rollout.dtype],
        kv_bytes=_BYTES[rollout.dtype],
        batched_tokens=rollout.max_num_batched_tokens,
        max_num_seqs=rollout.max_num_seqs,
        longest_row=max_row_tokens(config.data),
    )


def _micro_tokens(config: RunConfig, *, ranks: int) -> int:
    """Return the most tokens of a micro-batch on one device.

    The token budget is per device already; rows of a fixed micro-batch are cut by `ranks`.
    """
    actor, longest = config.actor_rollout_ref.actor, max_row_tokens(config.data)
    if actor.use_dynamic_bsz:
        return max(actor.ppo_max_token_len_per_gpu, -(-longest // ranks))
    return -(-(actor.ppo_micro_batch_size_per_gpu or 1) * longest // ranks)
