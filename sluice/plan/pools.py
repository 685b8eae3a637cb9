"""The two pools of a run: what a trainer, an engine and their hosts hold, and when."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from sluice.config.derived import holds_whole_model, max_row_tokens, uses_critic, world_size
from sluice.config.memory.devices import DeviceKind
from sluice.config.memory.rollout import GIB, rollout_layout, rollout_memory
from sluice.config.memory.rollout import fits as weights_fit
from sluice.config.memory.shape import DTYPE_BYTES, ImageEncoder, ModelShape
from sluice.config.memory.training import MEAN_RESPONSE, group_flops, training_layout
from sluice.config.parallel_layout import ParallelLayout, trainer_layout
from sluice.config.run import RunConfig
from sluice.config.schema.actor import FsdpConfig
from sluice.config.sources import responses_per_step
from sluice.plan.dry_run import PassBytes
from sluice.plan.host import (
    MIB,
    ModelBytes,
    encoder_bytes,
    has_reference_model,
    offloaded_share,
    rank_host_bytes,
    replayed_bytes,
)

_BUCKETS = 2
"""Buckets of an update that a worker holds at once: one arrives while one is written."""
_MODELS_ON_HOST = {"torch": 2}
"""Models that an engine's workers hold together in host memory during an update: the version that
serves and the next; 1 with others, whose workers receive the next in the memory of the former."""
_SNAPSHOTS = 2
"""Copies of what a trainer rank sends in its host memory, in the dtype of the wire."""
_MOMENTS_AT_ONCE = 512 * MIB
"""Of offloaded ones, those of one part of the parameters."""


@dataclass(frozen=True, slots=True)
class TrainerPool:
    """A trainer's device, and a step.

    Attributes:
        parts: bytes on the device by what they hold; activations: what the largest micro-batch
            leaves for its backward pass.
        phases: peak bytes on the device by phase.
        moved: bytes that collectives bring to a rank in a micro-batch, by kind.
        micro_batches: of a rank in one step, all passes with gradients.
        compute_s: seconds a step computes at the device's full rate.
        moving_s: seconds a step's collectives take at the full rate of the link.
        host: bytes on one machine.
        stages: peaks of the stages that differ, by number from 0; all else is of the largest.
    """

    layout: ParallelLayout
    parts: Mapping[str, float]
    phases: Mapping[str, float]
    moved: Mapping[str, float]
    micro_batches: int
    compute_s: float
    moving_s: float
    host: float
    stages: Mapping[int, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Most bytes on the device."""
        return max(self.phases.values())

    @property
    def stage_name(self) -> str:
        """Return which stage this is of several, as ``stage 2 of 8``; empty: it is the only one."""
        if len(self.stages) < 2:
            return ""
        number = max(self.stages, key=lambda stage: self.stages[stage])
        return f"stage {number + 1} of {self.layout.pipeline}"

    def shortfall(self, device: DeviceKind) -> str | None:
        """Return why a trainer's device does not hold it; `None`: it does."""
        if self.peak <= device.usable_bytes:
            return None
        phase = max(self.phases, key=lambda name: self.phases[name])
        place = f" on {self.stage_name}" if self.stage_name else ""
        return (
            f"{phase}{place} takes {self.peak / GIB:.2f} GiB of the "
            f"{device.usable_bytes / GIB:.1f} that a plan fills"
        )

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
        holds_weights: memory * utilization * TP > parameters * 2 bytes, the rule of Ascend's
            practice guide.
    """

    tp: int
    phases: Mapping[str, float]
    longest_rows: int
    host: float
    holds_weights: bool

    @property
    def peak(self) -> float:
        """Most bytes on the device."""
        return max(self.phases.values())

    def shortfall(self, device: DeviceKind) -> str | None:
        """Return why an engine does not fit; `None`: it does.

        Its share of the device must hold the weights and a cache of at least one row, and the
        device an update beside them.
        """
        if not self.holds_weights:
            return (
                "weights of 2 bytes a parameter exceed memory * gpu_memory_utilization * "
                "tensor_model_parallel_size"
            )
        if self.longest_rows == 0:
            return "the cache does not hold one row of the longest length"
        if self.peak > device.size:
            return f"an update takes {self.peak / GIB:.2f} GiB of {device.gib:g}"
        return None

    def fits(self, device: DeviceKind) -> bool:
        """Return whether it lacks nothing."""
        return self.shortfall(device) is None


def extrapolate_layers(counted: Mapping[int, PassBytes], layers: int) -> PassBytes:
    """Return the bytes of so many layers from those of two numbers of them, or of all."""
    if layers in counted:
        return counted[layers]
    (small, of_small), (large, of_large) = sorted(counted.items())
    times = (layers - small) / (large - small)

    def at(at_small: float, at_large: float) -> int:
        return round(at_small + times * (at_large - at_small))

    names = [name for name in PassBytes.__struct_fields__ if name != "moved"]
    sizes = {name: at(getattr(of_small, name), getattr(of_large, name)) for name in names}
    moved = {kind: at(size, of_large.moved.get(kind, 0)) for kind, size in of_small.moved.items()}
    return PassBytes(**sizes, moved=moved)


class _ModelState:
    """What one of the trained models holds on the device between its passes, in bytes.

    Attributes:
        weights: that are on the device while another model computes.
        gradients: that stay; sharded ones are freed after a step, whole ones are only cleared.
        moments: on the device during passes.
        backward: peak of a backward pass, gradients there, moments not.
        step: peak of the optimizer's step, weights and gradients included.
        waiting: all that is on the device while another model computes.
    """

    def __init__(self, counted: PassBytes, sharding: FsdpConfig, shard: int) -> None:
        self.weights = 0 if sharding.param_offload else counted.parameters
        self.gradients = counted.gradients if holds_whole_model(sharding, shard) else 0
        away = counted.moments * offloaded_share(sharding)
        self.moments = counted.moments - away
        self.backward = counted.backward
        self.step = counted.step - away + min(away, _MOMENTS_AT_ONCE)
        self.waiting = self.weights + self.gradients + self.moments


@dataclass(frozen=True, slots=True)
class _Images:
    """What images take on a trainer's device beside their encoder's state, in bytes."""

    pixels: float = 0.0
    kept: float = 0.0


def largest_pool(
    config: RunConfig,
    shape: ModelShape,
    device: DeviceKind,
    counted: Mapping[int, PassBytes],
    encoder: ImageEncoder | None = None,
) -> TrainerPool:
    """Return the pool of the stage with the largest peak.

    Args:
        counted: of all layers of the decoder's stages that differ, by their numbers from 0.
        encoder: encodes images, on the first stage; the passes were counted without it.
    """
    pools = {
        number: trainer_pool(config, shape, device, pass_bytes, None if number else encoder)
        for number, pass_bytes in counted.items()
    }
    largest = max(pools.values(), key=lambda pool: pool.peak)
    return replace(
        largest,
        host=max(pool.host for pool in pools.values()),
        stages={number: pool.peak for number, pool in pools.items()},
    )


def trainer_pool(
    config: RunConfig,
    shape: ModelShape,
    device: DeviceKind,
    counted: PassBytes,
    encoder: ImageEncoder | None = None,
) -> TrainerPool:
    """Return the pool of one stage, or of the only one."""
    layout = trainer_layout(config, world_size(config))
    sharding = config.actor_rollout_ref.actor.fsdp_config
    images = _images(config, layout, encoder)
    critic = None
    if uses_critic(config):
        critic = _ModelState(counted, config.critic.fsdp, layout.copy)
    # Each trained weight has a gradient of its dtype.
    decoder = ModelBytes(counted.parameters, counted.gradients, counted.moments)
    counted = _with_encoder(
        counted, encoder_bytes(config, encoder), stays=holds_whole_model(sharding, layout.copy)
    )
    policy = _ModelState(counted, sharding, layout.copy)
    reference = counted.parameters if has_reference_model(config) else 0
    # The reference's weights stand beside the policy's, or in their place.
    reference = 0 if sharding.param_offload else reference
    phases = _phases(counted, policy, critic, images, replayed_bytes(config, shape), reference)
    models = [policy, *([critic] if critic else [])]
    parts = {
        "weights": counted.parameters + (critic.weights if critic else 0.0),
        "gradients": counted.gradients + (critic.gradients if critic else 0.0),
        "moments": sum(model.moments for model in models),
        "activations": counted.kept + images.pixels + images.kept,
    }
    micro_batches = _micro_batches(config, layout)
    operations = config.data.train_batch_size * group_flops(config, shape)
    moved = {kind: float(size) for kind, size in counted.moved.items()}
    local = config.trainer.n_gpus_per_node
    # Each rank of the first copy has snapshots of its shards; each stage has a part of the model.
    sent = min(1.0, local / (layout.copy * layout.pipeline)) * _wire_bytes(config, shape)
    host = local * rank_host_bytes(config, shape, decoder, encoder)
    return TrainerPool(
        layout,
        parts,
        phases,
        moved,
        micro_batches,
        operations / layout.ranks / device.flops * (1 + _bubble(config, layout, micro_batches)),
        sum(moved.values()) * micro_batches / device.link_rate,
        host + _SNAPSHOTS * sent,
    )


def _bubble(config: RunConfig, layout: ParallelLayout, micro_batches: int) -> float:
    """Return the time that stages wait, over the time that they compute: of each mini-batch."""
    steps = config.data.train_batch_size / config.actor_rollout_ref.actor.ppo_mini_batch_size
    per_mini_batch = micro_batches / (steps * config.actor_rollout_ref.actor.ppo_epochs)
    return (layout.pipeline - 1) / max(1.0, per_mini_batch)


def _with_encoder(counted: PassBytes, encoder: ModelBytes, *, stays: bool) -> PassBytes:
    """Add what the image encoder holds; `stays`: gradients are there in passes without any."""
    weights, trained, moments = map(round, (encoder.weights, encoder.trained, encoder.moments))
    return structs.replace(
        counted,
        parameters=counted.parameters + weights,
        gradients=counted.gradients + trained,
        moments=counted.moments + moments,
        log_prob=counted.log_prob + weights + trained * stays,
        forward=counted.forward + weights + trained,
        backward=counted.backward + weights + trained,
        step=counted.step + weights + trained + moments,
    )


def _phases(
    counted: PassBytes,
    policy: _ModelState,
    critic: _ModelState | None,
    images: _Images,
    kept: float,
    reference: float,
) -> dict[str, float]:
    """Return the peaks.

    Args:
        kept: bytes of replayed experts, which stay.
        reference: bytes of the reference's weights beside the policy's.
    """
    # What a critic holds stays beside the policy's passes, and the other way round.
    beside = kept + (critic.waiting if critic else 0.0)
    moments_and_beside = policy.moments + beside
    phases = {
        "idle": counted.parameters + policy.gradients + moments_and_beside,
        "logprobs": counted.log_prob + moments_and_beside + images.pixels + reference,
        "forward": counted.forward + moments_and_beside + images.pixels + images.kept,
        "backward": policy.backward + moments_and_beside + images.pixels + images.kept,
        "optimizer step": policy.step + beside,
    }
    if critic:
        beside = kept + policy.waiting
        phases["critic"] = critic.backward + critic.moments + beside
        phases["critic's step"] = critic.step + beside
    return phases


def _images(config: RunConfig, layout: ParallelLayout, encoder: ImageEncoder | None) -> _Images:
    """Return the bytes if each prompt is one image from end to end, which ranks cannot divide."""
    if encoder is None:
        return _Images()
    actor, data = config.actor_rollout_ref.actor, config.data
    prompts = actor.ppo_micro_batch_size_per_gpu or 1
    if actor.use_dynamic_bsz:
        longest = max_row_tokens(data)
        prompts = -(-max(actor.ppo_max_token_len_per_gpu * layout.sequence, longest) // longest)
    tokens = data.max_prompt_length * max(1.0, prompts / layout.row_ranks)
    pixels = tokens * encoder.pixel_bytes
    if actor.freeze_vision_tower:
        return _Images(pixels)
    kept = tokens * encoder.saved_bytes(
        recomputes=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        dtype_bytes=DTYPE_BYTES[actor.fsdp_config.dtype],
    )
    # The first of several stages has as many micro-batches in flight as there are stages.
    return _Images(pixels, layout.pipeline * kept + (layout.pipeline - 1) * pixels)


def engine_pool(config: RunConfig, shape: ModelShape, device: DeviceKind) -> EnginePool:
    """Return an engine's pool: it fills its share of the device with the cache."""
    layout, size = rollout_layout(config), device.size
    memory = rollout_memory(shape, layout, size)
    assert memory.kv_cache is not None
    assert memory.longest_rows is not None
    staging = _BUCKETS * config.sluice.weights.bucket_mb * MIB
    generating = memory.weights + memory.activations + memory.kv_cache
    models = _MODELS_ON_HOST.get(config.actor_rollout_ref.rollout.name, 1)
    return EnginePool(
        layout.tp,
        {"start": memory.weights, "generating": generating, "update": generating + staging},
        memory.longest_rows,
        models * _wire_bytes(config, shape),
        weights_fit(shape, layout, size),
    )


def _wire_bytes(config: RunConfig, shape: ModelShape) -> int:
    return shape.total_parameters * DTYPE_BYTES[config.actor_rollout_ref.rollout.dtype]


def _micro_batches(config: RunConfig, layout: ParallelLayout) -> int:
    actor, data = config.actor_rollout_ref.actor, config.data
    rows = responses_per_step(config)
    if actor.use_dynamic_bsz:
        budget = actor.ppo_max_token_len_per_gpu * layout.sequence
        row_tokens: float = max(budget, max_row_tokens(data))
        prompts = data.train_batch_size * data.max_prompt_length  # a group computes its prompt once
        number = (prompts + rows * data.max_response_length * MEAN_RESPONSE) / row_tokens
    else:
        number = rows / (actor.ppo_micro_batch_size_per_gpu or 1)
    return math.ceil(number / layout.data_ranks) * actor.ppo_epochs


def layer_counts(config: RunConfig, layers: int) -> Sequence[int]:
    """Return the numbers of layers to count: from three on, each adds the same bytes.

    All are counted if only the first ones are recomputed, or if the names of the adapted modules
    may contain layer numbers.
    """
    model = config.actor_rollout_ref.model
    targets, left_out = model.target_modules, model.exclude_modules or ()
    patterns = [left_out] if isinstance(left_out, str) else [*left_out]
    # The dry run itself takes the numbers out of a list.
    patterns += [targets] if isinstance(targets, str) else []
    if model.lora_rank and any(re.search(r"[0-9]", pattern) for pattern in patterns):
        return (layers,)
    recomputed = training_layout(config).recomputed_of(layers)
    return (3, 4) if layers > 4 and recomputed in (0, layers) else (layers,)
