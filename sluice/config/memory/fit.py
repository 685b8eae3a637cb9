"""Rules of a device's memory: engine, update, and both together, each with what would fit."""

from __future__ import annotations

from dataclasses import replace

from sluice.config.derived import max_row_tokens
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.layouts import own_training_layout, rollout_layout, verl_training_layout
from sluice.config.memory.rollout import GIB, RolloutLayout, fits, smallest_tensor_parallel
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import TrainingLayout, training_memory
from sluice.config.problems import Violation, violation
from sluice.config.run import RunConfig
from sluice.config.verl_run import ACTOR, MEGATRON, ROLLOUT


def memory_violations(
    config: RunConfig, settings: KeySettings, shape: ModelShape, device_gib: float
) -> list[Violation]:
    """Where a device of `device_gib` GiB is too small."""
    device, engine = device_gib * GIB, rollout_layout(config, settings)
    layout = verl_training_layout(config, settings)
    colocated = settings.flag("actor_rollout_ref.hybrid_engine", otherwise=True)
    return [
        *_engine_fit(shape, engine, device),
        *_update_fit(config, shape, layout, device),
        *_own_update_fit(config, shape, device),
        *(_colocated_fit(shape, layout, engine, device) if colocated else ()),
    ]


def _engine_fit(shape: ModelShape, engine: RolloutLayout, device: float) -> list[Violation]:
    if fits(shape, engine, device):
        return []
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    what = (
        f"{key} = {engine.tp}: {device / GIB:g} GiB * {ROLLOUT}.gpu_memory_utilization "
        f"{engine.utilization:g} * {engine.tp} cannot hold {shape.total_parameters:,} parameters "
        "of 2 bytes"
    )
    smallest = smallest_tensor_parallel(shape, device, engine.utilization)
    if smallest is None:
        text = f"{what}, nor can any size that divides {shape.heads} heads; use larger devices"
        return [Violation("engine-memory", text)]
    return [violation("engine-memory", what, f"{key}={smallest}", here=True)]


def _update_fit(
    config: RunConfig, shape: ModelShape, layout: TrainingLayout, device: float
) -> list[Violation]:
    peak = training_memory(shape, layout).update
    if peak <= device:
        return []
    what = (
        f"the policy update needs about {peak / GIB:.1f} GiB on each of {layout.world} trainer "
        f"ranks (trainer.nnodes * trainer.n_gpus_per_node), which have {device / GIB:g} GiB"
    )
    remedy = _smaller_update(config, shape, layout, device)
    if remedy:
        return [violation("update-memory", what, *remedy)]
    return [Violation("update-memory", f"{what}; use larger devices or shorter rows", here=False)]


def _own_update_fit(config: RunConfig, shape: ModelShape, device: float) -> list[Violation]:
    """sluice's trainer shares the model by ``fsdp_size`` alone and offloads nothing."""
    layout = own_training_layout(config)
    peak = training_memory(shape, layout).update
    if peak <= device:
        return []
    what = (
        f"the policy update needs about {peak / GIB:.1f} GiB here, where {layout.shard} of "
        f"{layout.world} trainer ranks share {shape.total_parameters:,} parameters and optimizer "
        f"state, of {device / GIB:g} GiB"
    )
    overrides: list[str] = []
    for lighten in (_checkpointing, _fully_sharded, _summed_each_pass):
        lighter, override = lighten(config, layout)
        if lighter == layout:
            continue
        layout = lighter
        overrides.append(override)
        if training_memory(shape, layout).update <= device:
            return [violation("own-update-memory", what, *overrides, here=True)]
    return [Violation("own-update-memory", f"{what}; use a smaller model or larger devices")]


def _smaller_update(
    config: RunConfig, shape: ModelShape, layout: TrainingLayout, device: float
) -> tuple[str, ...]:
    """What to change, the cheapest first, until it is enough; nothing if even all is not."""
    overrides: list[str] = []
    for lighten in (_checkpointing, _fused_logits, _smallest_micro_batch, _streaming):
        lighter, override = lighten(config, layout)
        if lighter == layout:
            continue
        layout = lighter
        overrides.append(override)
        if training_memory(shape, layout).update <= device:
            return tuple(overrides)
    return ()


def _checkpointing(_: RunConfig, layout: TrainingLayout) -> tuple[TrainingLayout, str]:
    key = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    if layout.backend == "megatron":
        key = f"+{MEGATRON}.override_transformer_config.recompute_granularity=full"
    return replace(layout, gradient_checkpointing=True), key


def _fully_sharded(_: RunConfig, layout: TrainingLayout) -> tuple[TrainingLayout, str]:
    key = f"{ACTOR}.fsdp_config.fsdp_size=-1"
    if layout.world == 1:
        return layout, key
    return replace(layout, backend="fsdp", shard=layout.world), key


def _summed_each_pass(_: RunConfig, layout: TrainingLayout) -> tuple[TrainingLayout, str]:
    key = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=false"
    if layout.backend == "replicated":
        return layout, key
    return replace(layout, whole_gradients=False), key


def _fused_logits(_: RunConfig, layout: TrainingLayout) -> tuple[TrainingLayout, str]:
    return replace(layout, fused_logits=True), "actor_rollout_ref.model.use_fused_kernels=true"


def _smallest_micro_batch(config: RunConfig, layout: TrainingLayout) -> tuple[TrainingLayout, str]:
    """One row, or the budget that just holds the longest."""
    ranks = layout.cp if layout.backend == "megatron" else layout.sp
    tokens = -(-max_row_tokens(config.data) // ranks)
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        key = f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}"
    return replace(layout, micro_tokens=min(tokens, layout.micro_tokens)), key


def _streaming(_: RunConfig, layout: TrainingLayout) -> tuple[TrainingLayout, str]:
    streamed = layout.backend == "fsdp"
    key = f"{ACTOR}.fsdp_config.offload_policy=true"
    return replace(layout, streamed_offload=streamed), key


def _colocated_fit(
    shape: ModelShape, layout: TrainingLayout, engine: RolloutLayout, device: float
) -> list[Violation]:
    """verl's engine takes its share of a device on which the trainer's state stays."""
    idle = training_memory(shape, layout).idle
    capacity = (device - idle) / device
    if engine.utilization <= capacity:
        return []
    key = f"{ROLLOUT}.gpu_memory_utilization"
    what = (
        f"{key} = {engine.utilization:g} of {device / GIB:g} GiB beside {idle / GIB:.1f} GiB of "
        "trainer state that stays while verl's colocated engine generates"
    )
    share = int(capacity * 20) / 20
    if share > 0 and fits(shape, replace(engine, utilization=share), device):
        return [violation("colocated-memory", what, f"{key}={share:g}")]
    section = MEGATRON if layout.backend == "megatron" else f"{ACTOR}.fsdp_config"
    moved = (
        ("param", "optimizer", "grad") if layout.backend == "megatron" else ("param", "optimizer")
    )
    offloads = (f"{section}.{name}_offload=true" for name in moved)
    return [violation("colocated-memory", what, *offloads)]
