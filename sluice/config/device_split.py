"""Divide the devices of a launch into those that train and those that generate.

A launch of verl is colocated: both happen on all devices in turns. Here each has its own, so that
they work at the same time. The ratio follows from how long a device takes for one token of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sluice.config.derived import max_row_tokens, replica_devices, uses_reference, world_size
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.devices import DeviceKind
from sluice.config.memory.layouts import own_training_layout, rollout_layout
from sluice.config.memory.rollout import engine_weights, rollout_memory
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import training_memory
from sluice.config.run import RunConfig
from sluice.errors import ConfigError

PLACEMENT_KEY = "sluice.placement"
_PLACEMENT = re.compile(r"^trainer:(\d+),rollout:(\d+)$")
_MEAN_RESPONSE = 0.5
"""Mean length of a response over the longest: unknown before a run."""
_TRAINING_SHARE = 0.4
"""Share of a device's floating-point operations that training reaches."""
_READING_SHARE = 0.6
"""Share of a device's memory rate that decoding reaches."""


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """Devices of a run.

    Args:
        trainer: devices that train, one for each rank.
        rollout: devices that generate.
        nodes: machines of the trainer's devices.
        per_replica: devices of one replica.
    """

    trainer: int
    rollout: int
    nodes: int
    per_replica: int

    @property
    def replicas(self) -> int:
        """Replicas on the devices that generate."""
        return self.rollout // self.per_replica

    @property
    def placement(self) -> str:
        """The same as a value of ``sluice.placement``."""
        return f"trainer:{self.trainer},rollout:{self.rollout}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """What makes a launch use these devices."""
        return (
            f"trainer.nnodes={self.nodes}",
            f"trainer.n_gpus_per_node={self.trainer // self.nodes}",
            f"sluice.rollout.replicas={self.replicas}",
        )


def is_colocated(config: RunConfig, settings: KeySettings) -> bool:
    """Return whether the devices that are named must serve trainer and rollouts alike."""
    if config.sluice.placement != "auto":
        return True
    separate = ("sluice.rollout.replicas", "actor_rollout_ref.rollout.nnodes")
    return not any(settings.is_set(key) for key in separate)


def device_split(
    config: RunConfig, settings: KeySettings, shape: ModelShape, device: DeviceKind
) -> DeviceSplit:
    """Return the split of a launch: as ``sluice.placement`` says, or the fastest by estimate.

    Raises:
        ConfigError: the devices are too few, or the placement is not of this launch.
    """
    if not is_colocated(config, settings):
        each = replica_devices(config)
        devices = each * config.sluice.rollout.replicas
        return DeviceSplit(world_size(config), devices, config.trainer.nnodes, each)
    possible = list(splits(config))
    if config.sluice.placement != "auto":
        return _asked(config, possible)
    if not possible:
        each = replica_devices(config)
        raise ConfigError(
            f"{PLACEMENT_KEY}=auto: {world_size(config)} device(s) (trainer.nnodes * "
            f"trainer.n_gpus_per_node) are too few for a trainer and a replica of {each} devices "
            f"of their own; give at least {each + 1}"
        )
    return by_speed(config, shape, device, possible)[0]


def splits(config: RunConfig) -> Iterator[DeviceSplit]:
    """Yield the possible splits: whole replicas, and a trainer on whole machines or on one."""
    devices, per_node = world_size(config), config.trainer.n_gpus_per_node
    each, sharding = replica_devices(config), config.actor_rollout_ref.actor.fsdp_config
    sharing, experts = sharding.ulysses_sequence_parallel_size, sharding.expert_parallel_size
    for trainer in range(1, devices):
        nodes = max(1, trainer // per_node)
        if trainer > per_node and trainer % per_node:
            continue
        if (devices - trainer) % each or trainer % sharing or trainer % experts:
            continue
        yield DeviceSplit(trainer, devices - trainer, nodes, each)


def by_speed(
    config: RunConfig, shape: ModelShape, device: DeviceKind, possible: list[DeviceSplit]
) -> list[DeviceSplit]:
    """Return the splits, the fastest first; then those whose trainer is too small, the one that
    lacks least first.
    """
    train, generate = seconds_per_token(config, shape, device)
    layout = own_training_layout(config)

    def rank(split: DeviceSplit) -> tuple[float, float]:
        shard = split.trainer if layout.shard == layout.world else min(layout.shard, split.trainer)
        other = replace(layout, world=split.trainer, shard=shard)
        missing = max(0.0, training_memory(shape, other).update - device.usable_bytes)
        return missing, max(train / split.trainer, generate / split.rollout)

    return sorted(possible, key=rank)


def seconds_per_token(
    config: RunConfig, shape: ModelShape, device: DeviceKind
) -> tuple[float, float]:
    """Return how long one device takes to train one response token, and to generate one.

    Training: 2 operations a parameter and token for each forward pass, 4 for a backward pass.
    Generating: a step of an engine reads its weights, and the keys and values of all sequences.
    """
    data, layout = config.data, rollout_layout(config)
    response = data.max_response_length * _MEAN_RESPONSE
    n = config.actor_rollout_ref.rollout.n
    # A prompt is computed once for all rows that share it.
    tokens = 1 + data.max_prompt_length / (n * response)
    passes = 6 + 2 + 2 * uses_reference(config)
    passes += 2 * own_training_layout(config).gradient_checkpointing
    train = tokens * passes * shape.active_parameters / (device.flops * _TRAINING_SHARE)
    weights = engine_weights(shape, layout) * layout.tp
    engine = rollout_memory(shape, layout, device.gib * (1 << 30))
    context = data.max_prompt_length + response / 2
    fitting = (engine.kv_tokens or 0) / max_row_tokens(data) / _MEAN_RESPONSE
    running = max(1.0, min(layout.max_num_seqs, fitting))
    read = weights + running * context * engine.kv_per_token * layout.tp
    step = read / (device.memory_rate * _READING_SHARE)
    step = max(step, 2 * shape.active_parameters * running / (device.flops * _TRAINING_SHARE))
    return train, step / running * _filtered(config)


def _filtered(config: RunConfig) -> float:
    """Return the samples generated for one that is trained."""
    rounds = config.data.gen_batch_size or config.data.train_batch_size
    is_filtered = config.algorithm.filter_groups.enable
    return max(1.0, rounds / config.data.train_batch_size) if is_filtered else 1.0


def _asked(config: RunConfig, possible: list[DeviceSplit]) -> DeviceSplit:
    value = config.sluice.placement
    matched = _PLACEMENT.match(value)
    found = [one for one in possible if matched and one.placement == value]
    if not found:
        choices = ", ".join(one.placement.replace(",", " ") for one in possible) or "none"
        raise ConfigError(
            f'{PLACEMENT_KEY}="{value}" does not divide the {world_size(config)} devices '
            f"(trainer.nnodes * trainer.n_gpus_per_node) into a trainer and replicas of "
            f"{replica_devices(config)}; give auto, or one of: {choices}"
        )
    return found[0]
