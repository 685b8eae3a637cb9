"""The two pools of a run: what a trainer, an engine and their hosts hold, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.config.derived import (
    adapts,
    largest_batch_mb,
    max_row_tokens,
    uses_critic,
    uses_reference,
    world_size,
)
from sluice.config.memory.devices import DeviceKind
from sluice.config.memory.layouts import own_training_layout, rollout_layout
from sluice.config.memory.rollout import fits as weights_fit
from sluice.config.memory.rollout import rollout_memory
from sluice.config.memory.shape import ModelShape
from sluice.config.parallel_layout import ParallelLayout, trainer_layout
from sluice.config.run import RunConfig
from sluice.plan.dry_run import PassBytes

MIB = 1 << 20
_BUCKETS = 2
"""Buckets of an update that a worker holds at once: one arrives while one is written."""
_WIRE_BYTES = {"float32": 4, "bfloat16": 2}
_MODELS_ON_HOST = {"torch": 1}
"""Models that an engine's worker holds in host memory during an update; otherwise 2."""
_MEAN_RESPONSE = 0.5
_STATES = 4
"""Weights, gradients and two moments, of a dtype each."""
_MOMENTS_AT_ONCE = 512 * MIB
"""Of offloaded ones, those of one part of the parameters."""


@dataclass(frozen=True, slots=True)
class TrainerPool:
    """A trainer's device, and a step.

    Attributes:
        layout: its ranks.
        phases: peak bytes on the device by phase.
        moved: bytes that collectives bring to a rank in a micro-batch, by kind.
        micro_batches: of a rank in one step, all passes with gradients.
        compute_s: seconds a step computes at the device's full rate.
        moving_s: seconds a step's collectives take at the full rate of the link.
        host: bytes on one host.
    """

    layout: ParallelLayout
    phases: Mapping[str, float]
    moved: Mapping[str, float]
    micro_batches: int
    compute_s: float
    moving_s: float
    host: float

    @property
    def peak(self) -> float:
        """Most bytes on the device."""
        return max(self.phases.values())

    @property
    def floor_s(self) -> float:
        """Seconds that a step takes at least."""
        return max(self.compute_s, self.moving_s)


@dataclass(frozen=True, slots=True)
class EnginePool:
    """An engine's device.

    Attributes:
        phases: bytes on the device: while it starts, generates and takes an update.
        longest_rows: rows of the longest length that the cache holds at once.
        host: bytes in host memory for one replica during an update.
        holds_weights: the practice guide's rule: memory * utilization * TP > parameters * 2 bytes.
    """

    tp: int
    replicas: int
    phases: Mapping[str, float]
    longest_rows: int
    host: float
    holds_weights: bool

    @property
    def peak(self) -> float:
        """Most bytes on the device."""
        return max(self.phases.values())

    def fits(self, device: DeviceKind) -> bool:
        """Return whether the weights fit beside a cache of at least one row."""
        has_memory = self.peak <= device.gib * 1024 * MIB
        return self.holds_weights and self.longest_rows > 0 and has_memory


def extrapolated(
    few: PassBytes, more: PassBytes, step: int, layers: int, few_layers: int
) -> PassBytes:
    """Return the bytes of a model of `layers` layers from those of two with `step` between them."""
    times = (layers - few_layers) / step

    def at(first: float, second: float) -> int:
        return round(first + times * (second - first))

    names = [name for name in PassBytes.__struct_fields__ if name != "moved"]
    sizes = {name: at(getattr(few, name), getattr(more, name)) for name in names}
    moved = {kind: at(size, more.moved.get(kind, 0)) for kind, size in few.moved.items()}
    return PassBytes(**sizes, moved=moved)


def trainer_pool(
    config: RunConfig,
    shape: ModelShape,
    device: DeviceKind,
    counted: PassBytes,
    encoder: int = 0,
) -> TrainerPool:
    """Return the trainer's pool.

    Args:
        counted: of all layers.
        encoder: parameters of an image encoder, which the passes were counted without.
    """
    layout = trainer_layout(config, world_size(config))
    model, sharding = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.fsdp_config
    away = counted.moments if sharding.optimizer_offload else 0
    state = encoder * 4 / layout.shard
    if uses_critic(config):
        state += counted.parameters
    held = counted.moments - away + _STATES * state
    # Adapters' reference is the policy without them.
    has_reference = uses_reference(config) and not adapts(model)
    reference = counted.parameters if has_reference else 0
    phases = {
        "idle": counted.parameters + held,
        # The reference's weights stand beside the policy's, or in their place.
        "logprobs": counted.log_prob + held + (0 if sharding.param_offload else reference),
        "forward": counted.forward + held,
        "backward": counted.backward + held,
        "optimizer step": counted.step - away + min(away, _MOMENTS_AT_ONCE) + _STATES * state,
    }
    tokens = _step_tokens(config)
    micro_batches = _micro_batches(config, layout, tokens)
    passes = 8 + 2 * uses_reference(config)
    passes += 2 * own_training_layout(config).gradient_checkpointing
    operations = passes * shape.active_parameters * tokens
    moved = {kind: float(size) for kind, size in counted.moved.items()}
    return TrainerPool(
        layout,
        phases,
        moved,
        micro_batches,
        operations / layout.ranks / device.flops,
        sum(moved.values()) * micro_batches / device.link_rate,
        config.trainer.n_gpus_per_node * (reference + away + largest_batch_mb(config) * MIB),
    )


def engine_pool(config: RunConfig, shape: ModelShape, device: DeviceKind) -> EnginePool:
    """Return an engine's pool: it fills its share of the device with the cache."""
    layout, whole = rollout_layout(config), device.gib * 1024 * MIB
    memory = rollout_memory(shape, layout, whole)
    assert memory.kv_cache is not None
    assert memory.longest_rows is not None
    staging = _BUCKETS * config.sluice.weights.bucket_mb * MIB
    generating = memory.weights + memory.activations + memory.kv_cache
    rollout = config.actor_rollout_ref.rollout
    models = _MODELS_ON_HOST.get(rollout.name, 2)
    wire = shape.total_parameters * _WIRE_BYTES[rollout.dtype]
    return EnginePool(
        layout.tp,
        config.sluice.rollout.replicas,
        {"start": memory.weights, "generating": generating, "update": generating + staging},
        memory.longest_rows,
        models * wire * layout.tp,
        weights_fit(shape, layout, whole),
    )


def _step_tokens(config: RunConfig) -> float:
    """Return the tokens that one step trains: a prompt once, responses of half the limit."""
    data, n = config.data, config.actor_rollout_ref.rollout.n
    group = data.max_prompt_length + n * data.max_response_length * _MEAN_RESPONSE
    return data.train_batch_size * group


def _micro_batches(config: RunConfig, layout: ParallelLayout, tokens: float) -> int:
    actor, data = config.actor_rollout_ref.actor, config.data
    if actor.use_dynamic_bsz:
        budget = actor.ppo_max_token_len_per_gpu * layout.sequence
        each: float = max(budget, max_row_tokens(data))
        number = tokens / each
    else:
        rows = data.train_batch_size * config.actor_rollout_ref.rollout.n
        number = rows / (actor.ppo_micro_batch_size_per_gpu or 1)
    return math.ceil(number / layout.data_ranks) * actor.ppo_epochs


def layer_counts(layers: int) -> Sequence[int]:
    """Return the numbers of layers to count: from three on, each adds the same bytes."""
    return (3, 4) if layers > 4 else (layers,)
