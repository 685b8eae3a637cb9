"""The smallest change that makes a launch fit: of layout, recompute, offload, dtypes and split.

Of what can be offloaded, moments are: parameters and gradients stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from sluice.config.derived import world_size
from sluice.config.device_split import DeviceSplit
from sluice.config.memory.devices import DeviceKind
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import MemoryEstimate, guessed_memory, training_layout
from sluice.config.parallel_layout import (
    EXPERT_KEY,
    SEQUENCE_KEY,
    SHARD_KEY,
    shares_heads,
    trainer_layout,
)
from sluice.config.run import RunConfig, changed
from sluice.errors import ConfigError

_FSDP = "actor_rollout_ref.actor.fsdp_config"
_RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing"
_MEGATRON = "actor_rollout_ref.actor.megatron.override_transformer_config"
_SUMS_ONCE = f"{_FSDP}.use_no_sync_for_gradient_accumulation"
_RESHARD, _OFFLOAD = f"{_FSDP}.reshard_after_forward", f"{_FSDP}.optimizer_offload"
_DTYPE, _ROLLOUT = f"{_FSDP}.model_dtype", "actor_rollout_ref.rollout"
_REPLICAS = "sluice.rollout.replicas"
_LARGEST_GROUP = 32


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Overrides, and what they cost: 1 is a change that few would mind, 8 one that may harm."""

    overrides: tuple[str, ...] = ()
    price: float = 0.0


def engine_change(
    config: RunConfig,
    shape: ModelShape,
    holds: Callable[[RunConfig], bool],
    *,
    is_split: bool,
) -> PlanChange | None:
    """Return the smallest tensor parallel size at which an engine fits; `None`: none does.

    Args:
        is_split: the number of replicas follows from a split; otherwise larger ones are fewer, on
            as many devices.
    """
    rollout, replicas = config.actor_rollout_ref.rollout, config.sluice.rollout.replicas
    configured = rollout.tensor_model_parallel_size
    if holds(config):
        return PlanChange()
    if rollout.name == "torch":  # on one device
        return None
    for times in _doublings(2):
        tp = configured * times
        if tp > _LARGEST_GROUP or (replicas % times and not is_split):
            return None
        if not shares_heads(tp, shape.heads, shape.kv_heads):
            continue
        overrides = [f"{_ROLLOUT}.tensor_model_parallel_size={tp}"]
        if rollout.expert_parallel_size == configured * rollout.data_parallel_size > 1:
            experts = tp * rollout.data_parallel_size
            overrides.append(f"{_ROLLOUT}.expert_parallel_size={experts}")
        if not is_split:
            overrides.append(f"{_REPLICAS}={replicas // times}")
        if holds(changed(config, overrides)):
            return PlanChange(tuple(overrides), 1.0)
    return None


def trainer_changes(
    config: RunConfig,
    shape: ModelShape,
    split: DeviceSplit,
    splits: Sequence[DeviceSplit],
) -> list[PlanChange]:
    """Return all combinations of changes to a trainer, the cheapest first.

    Args:
        split: the trainer's, from which another costs as much as it makes a pool smaller.
    """
    unchanged = PlanChange()
    all_parts = product(
        _splits(split, splits),
        (unchanged, *_recompute(config, shape)),
        _shards(config),
        (unchanged, *_experts(config, shape)),
        (unchanged, *_sequences(config, shape)),
        (unchanged, *_offload(config)),
        (unchanged, *_dtypes(config)),
    )
    changes = [
        PlanChange(sum((part.overrides for part in parts), ()), sum(part.price for part in parts))
        for parts in all_parts
    ]
    return sorted(changes, key=lambda change: change.price)


def guess(config: RunConfig, shape: ModelShape) -> MemoryEstimate | None:
    """Return a guess of the update; `None`: the sizes do not divide."""
    try:
        trainer_layout(config, world_size(config))
    except ConfigError:
        return None
    return guessed_memory(shape, training_layout(config))


def promising_changes(
    changes: Sequence[PlanChange],
    shape: ModelShape,
    device: DeviceKind,
    config: RunConfig,
    correction: float,
) -> Iterator[PlanChange]:
    """Yield the changes that should fit."""
    for change in changes:
        candidate = changed(config, change.overrides)
        guessed = guess(candidate, shape)
        if guessed is not None and guessed.corrected(correction) <= device.usable_bytes:
            yield change


def _splits(current: DeviceSplit, splits: Sequence[DeviceSplit]) -> Iterator[PlanChange]:
    for split in splits:
        if split == current:
            yield PlanChange()
        else:
            slower = max(current.rollout / split.rollout, current.trainer / split.trainer)
            yield PlanChange(split.overrides, slower)


def _recompute(config: RunConfig, shape: ModelShape) -> Iterator[PlanChange]:
    if training_layout(config).recomputed_of(shape.layers) == shape.layers:
        return
    megatron = config.actor_rollout_ref.actor.megatron.override_transformer_config
    if megatron.recompute_granularity is None:
        yield PlanChange((f"{_RECOMPUTE}=true",), 1.0)
        return
    overrides = []
    if megatron.recompute_granularity != "full":
        overrides.append(f"{_MEGATRON}.recompute_granularity=full")
    if megatron.recompute_method == "block":
        overrides.append(f"{_MEGATRON}.recompute_method=uniform")
    yield PlanChange(tuple(overrides), 1.0)


def _shards(config: RunConfig) -> Iterator[PlanChange]:
    sharding = config.actor_rollout_ref.actor.fsdp_config
    overrides = []
    if sharding.fsdp_size > 0:
        overrides.append(f"{SHARD_KEY}=-1")
    if sharding.use_no_sync_for_gradient_accumulation:
        overrides.append(f"{_SUMS_ONCE}=false")
    if not sharding.reshard_after_forward:
        overrides.append(f"{_RESHARD}=true")
    for number in range(len(overrides) + 1):
        for chosen in combinations(overrides, number):
            yield PlanChange(chosen, float(number))


def _experts(config: RunConfig, shape: ModelShape) -> Iterator[PlanChange]:
    configured = config.actor_rollout_ref.actor.fsdp_config.expert_parallel_size
    if not (shape.experts and shape.adaptable_experts):  # the trainer divides only its own
        return
    for size in _doublings(max(configured, 1) * 2):
        if shape.experts % size == 0:
            yield PlanChange((f"{EXPERT_KEY}={size}",), 1.0 + size / 1000)


def _sequences(config: RunConfig, shape: ModelShape) -> Iterator[PlanChange]:
    configured = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    for doublings, size in enumerate(_doublings(configured * 2), 1):
        if shares_heads(size, shape.heads, shape.kv_heads):
            yield PlanChange((f"{SEQUENCE_KEY}={size}",), 1.0 + doublings / 4)


def _offload(config: RunConfig) -> Iterator[PlanChange]:
    if not config.actor_rollout_ref.actor.fsdp_config.optimizer_offload:
        yield PlanChange((f"{_OFFLOAD}=true",), 4.0)


def _dtypes(config: RunConfig) -> Iterator[PlanChange]:
    if config.actor_rollout_ref.actor.fsdp_config.model_dtype == "float32":
        yield PlanChange((f"{_DTYPE}=bfloat16",), 8.0)


def _doublings(size: int) -> Iterator[int]:
    while size <= _LARGEST_GROUP:
        yield size
        size *= 2
