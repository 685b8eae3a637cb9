"""Rules of a device's memory: engine, update, and both together, each with values that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msgspec import UNSET

from sluice.config.derived import max_row_tokens
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.layouts import own_training_layout, rollout_layout, verl_training_layout
from sluice.config.memory.rollout import GIB, RolloutLayout, fits, smallest_tensor_parallel
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import TrainingLayout, training_memory
from sluice.config.problems import Problem, verl_problem
from sluice.config.run import RunConfig
from sluice.config.verl_sizes import ACTOR, MEGATRON, ROLLOUT


def memory_problems(
    config: RunConfig, settings: KeySettings, shape: ModelShape, device_gib: float
) -> list[Problem]:
    """Return where a device of `device_gib` GiB is too small."""
    device, engine = device_gib * GIB, rollout_layout(config)
    layout = verl_training_layout(config, settings)
    colocated = settings.flag("actor_rollout_ref.hybrid_engine")
    return [
        *_engine_fit(shape, engine, device),
        *_update_fit(config, shape, layout, device),
        *_own_update_fit(config, shape, device),
        *(_colocated_fit(shape, layout, engine, device) if colocated else ()),
    ]


def _engine_fit(shape: ModelShape, engine: RolloutLayout, device: float) -> Iterator[Problem]:
    if fits(shape, engine, device):
        return
    key, rule = f"{ROLLOUT}.tensor_model_parallel_size", "engine-memory"
    message = (
        f": {device / GIB:g} GiB * {ROLLOUT}.gpu_memory_utilization {engine.utilization:g} * "
        f"{engine.tp} cannot hold {shape.total_parameters:,} parameters of 2 bytes"
    )
    smallest = smallest_tensor_parallel(shape, device, engine.utilization)
    if smallest is None:
        message = f"{message}, and neither can any size that divides {shape.heads} heads"
        yield Problem(key, engine.tp, message, "use larger devices", rule=rule)
    else:
        yield verl_problem(rule, key, engine.tp, message, f"{key}={smallest}", here=True)


def _update_fit(
    config: RunConfig, shape: ModelShape, layout: TrainingLayout, device: float
) -> Iterator[Problem]:
    peak = training_memory(shape, layout).update
    if peak <= device:
        return
    message = (
        f"the policy update needs about {peak / GIB:.1f} GiB on each of {layout.world} trainer "
        f"ranks (trainer.nnodes * trainer.n_gpus_per_node), which have {device / GIB:g} GiB"
    )
    overrides = _smaller_update(config, shape, layout, device)
    found = verl_problem("update-memory", "", UNSET, message, *overrides)
    yield found if overrides else replace(found, remedy="use larger devices or shorter rows")


def _own_update_fit(config: RunConfig, shape: ModelShape, device: float) -> Iterator[Problem]:
    """Yield whether the update fits as sluice runs it: ``fsdp_size`` ranks share."""
    layout = own_training_layout(config)
    peak = training_memory(shape, layout).update
    if peak <= device:
        return
    found = Problem(
        "",
        UNSET,
        f"the policy update needs about {peak / GIB:.1f} GiB here, where {layout.shard} of "
        f"{layout.world} trainer ranks share {shape.total_parameters:,} parameters and optimizer "
        f"state, of {device / GIB:g} GiB",
        rule="own-update-memory",
    )
    overrides: list[str] = []
    for lighten in (_checkpointing, _fully_sharded, _summed_each_pass):
        lighter, override = lighten(config, layout)
        if lighter == layout:
            continue
        layout = lighter
        overrides.append(override)
        if training_memory(shape, layout).update <= device:
            yield replace(found, overrides=tuple(overrides))
            return
    yield replace(found, remedy="use a smaller model or larger devices")


def _smaller_update(
    config: RunConfig, shape: ModelShape, layout: TrainingLayout, device: float
) -> tuple[str, ...]:
    """Return overrides, the cheapest first, until they are enough; none if all of them are not."""
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
    """Cut micro-batches to one row, or to the budget that just holds the longest."""
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
) -> Iterator[Problem]:
    """Yield whether verl's engine fits on a device that keeps the trainer's state."""
    idle = training_memory(shape, layout).idle
    capacity = (device - idle) / device
    if engine.utilization <= capacity:
        return
    key, rule = f"{ROLLOUT}.gpu_memory_utilization", "colocated-memory"
    message = (
        f"of {device / GIB:g} GiB beside {idle / GIB:.1f} GiB of trainer state that stays while "
        "verl's colocated engine generates"
    )
    share = int(capacity * 20) / 20
    if share > 0 and fits(shape, replace(engine, utilization=share), device):
        yield verl_problem(rule, key, engine.utilization, message, f"{key}={share:g}")
        return
    section = MEGATRON if layout.backend == "megatron" else f"{ACTOR}.fsdp_config"
    moved = (
        ("param", "optimizer", "grad") if layout.backend == "megatron" else ("param", "optimizer")
    )
    offloads = (f"{section}.{name}_offload=true" for name in moved)
    yield verl_problem(rule, key, engine.utilization, message, *offloads)
