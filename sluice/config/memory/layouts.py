"""Read the layouts of trainer and engine from the configuration."""

from __future__ import annotations

from sluice.config.derived import adapts, is_whole, max_row_tokens, world_size
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.rollout import RolloutLayout
from sluice.config.memory.training import TrainingLayout
from sluice.config.run import RunConfig
from sluice.config.verl_sizes import (
    ACTOR,
    MEGATRON,
    ParallelSplit,
    expert_tensor_parallel,
    parallel_split,
)

_MODEL = "actor_rollout_ref.model"
_FSDP, _RECOMPUTE = f"{ACTOR}.fsdp_config", f"{MEGATRON}.override_transformer_config"
_HYBRID = f"{ACTOR}.optim.override_optimizer_config"
# The gradient adds up in float32, beside a block's product and the result.
_HEAD_BYTES = 4 + 2 + 2
_BYTES = {"float32": 4, "bfloat16": 2}


def verl_training_layout(config: RunConfig, settings: KeySettings) -> TrainingLayout:
    """Return the trainer as verl would lay it out."""
    split = parallel_split(config, settings)
    return _megatron(config, settings, split) if split.megatron else _fsdp(config, settings, split)


def own_training_layout(config: RunConfig) -> TrainingLayout:
    """Return the trainer as sluice lays it out: ``fsdp_size`` ranks share."""
    world, sharding = world_size(config), config.actor_rollout_ref.actor.fsdp_config
    model, megatron = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.megatron
    recompute = megatron.override_transformer_config
    granularity, is_block = recompute.recompute_granularity, recompute.recompute_method == "block"
    shard = sharding.fsdp_size if 0 < sharding.fsdp_size < world else world
    return TrainingLayout(
        backend="replicated" if is_whole(sharding, shard) else "fsdp",
        world=world,
        shard=shard,
        reshard_after_forward=sharding.reshard_after_forward,
        whole_gradients=sharding.use_no_sync_for_gradient_accumulation,
        fused_logits=True,
        head_bytes=0 if adapts(model) else _HEAD_BYTES,
        sp=sharding.ulysses_sequence_parallel_size,
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
        # Not only between updates: passes run without the moments.
        optimizer_host_share=1.0 if sharding.optimizer_offload else 0.0,
        adapter_rank=model.lora_rank,
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


def _fsdp(config: RunConfig, settings: KeySettings, split: ParallelSplit) -> TrainingLayout:
    sharding = config.actor_rollout_ref.actor.fsdp_config
    whole = not 0 < split.fsdp_size < split.world
    return TrainingLayout(
        backend="fsdp",
        world=split.world,
        shard=split.world if whole else split.fsdp_size,
        sp=split.sp,
        micro_tokens=_micro_tokens(config, ranks=split.sp),
        master_bytes=_BYTES[sharding.model_dtype],
        compute_bytes=_BYTES[sharding.dtype],
        param_offload=settings.flag(f"{_FSDP}.param_offload"),
        optimizer_offload=settings.flag(f"{_FSDP}.optimizer_offload"),
        streamed_offload=settings.flag(f"{_FSDP}.offload_policy"),
        # verl checkpoints by default, sluice does not.
        gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing
        or not settings.is_set(f"{_MODEL}.enable_gradient_checkpointing"),
        activation_offload=settings.flag(f"{_MODEL}.enable_activation_offload"),
        fused_logits=settings.flag(f"{_MODEL}.use_fused_kernels"),
        reshard_after_forward=sharding.reshard_after_forward,
    )


def _megatron(config: RunConfig, settings: KeySettings, split: ParallelSplit) -> TrainingLayout:
    on_host = settings.flag(f"{_HYBRID}.optimizer_cpu_offload")
    share = settings.number(f"{_HYBRID}.optimizer_offload_fraction")
    return TrainingLayout(
        backend="megatron",
        world=split.world,
        micro_tokens=_micro_tokens(config, ranks=split.cp),
        tp=split.tp,
        pp=split.pp,
        cp=split.cp,
        ep=settings.whole(f"{MEGATRON}.expert_model_parallel_size"),
        etp=expert_tensor_parallel(settings),
        param_offload=settings.flag(f"{MEGATRON}.param_offload"),
        optimizer_offload=settings.flag(f"{MEGATRON}.optimizer_offload"),
        grad_offload=settings.flag(f"{MEGATRON}.grad_offload"),
        optimizer_host_share=share if on_host else 0.0,
        gradient_checkpointing=settings.value(f"{_RECOMPUTE}.recompute_granularity") == "full",
        fused_logits=settings.flag(f"{_MODEL}.use_fused_kernels"),
    )


def _micro_tokens(config: RunConfig, *, ranks: int) -> int:
    """Return the most tokens of a micro-batch on one device.

    The token budget is per device already; rows of a fixed micro-batch are cut by `ranks`.
    """
    actor, longest = config.actor_rollout_ref.actor, max_row_tokens(config.data)
    if actor.use_dynamic_bsz:
        return max(actor.ppo_max_token_len_per_gpu, -(-longest // ranks))
    return -(-(actor.ppo_micro_batch_size_per_gpu or 1) * longest // ranks)
