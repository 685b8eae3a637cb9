"""Divide the devices of a launch into those that train and those that generate.

A launch of verl is colocated: training and generation alternate on all devices. Here each has
separate devices, so that both work at the same time. The ratio follows from the time that a device
takes to train and to generate a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sluice.config.derived import max_row_tokens, replica_devices, world_size
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.devices import DeviceKind
from sluice.config.memory.rollout import engine_weights, rollout_layout, rollout_memory
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import (
    MEAN_RESPONSE,
    group_flops,
    guessed_memory,
    training_layout,
)
from sluice.config.parallel_layout import trainer_layout
from sluice.config.run import RunConfig
from sluice.config.sources import responses_per_step
from sluice.errors import ConfigError

PLACEMENT_KEY = "sluice.placement"
_PLACEMENT = re.compile(r"^trainer: *(\d+) *, *rollout: *(\d+)$")
_TRAINING_SHARE = 0.4
"""Share of a device's floating-point operations that training reaches."""
_READING_SHARE = 0.6
"""Share of a device's memory rate that decoding reaches."""
_GUESS_MARGIN = 1.05
"""Factor by which the counted bytes of the trainer may exceed the guess."""


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """The division of a run's devices.

    Args:
        trainer: devices that train, one for each rank.
        rollout: devices that generate.
        nodes: machines of the trainer's devices.
        per_replica: devices of one replica.
        replaces: the overrides replace a ``sluice.placement`` of the launch.
    """

    trainer: int
    rollout: int
    nodes: int
    per_replica: int
    replaces: bool = False

    @property
    def replicas(self) -> int:
        """The number of replicas on the devices that generate."""
        return self.rollout // self.per_replica

    @property
    def placement(self) -> str:
        """The split as a value of ``sluice.placement``."""
        return f"trainer:{self.trainer},rollout:{self.rollout}"

    @property
    def summary(self) -> str:
        """The use of the devices, as a clause."""
        size = "" if self.per_replica == 1 else f" of {self.per_replica}"
        return (
            f"{_counted_verb(self.trainer, 'train')}, {_counted_verb(self.rollout, 'generate')} in "
            f"{self.replicas} replica{'' if self.replicas == 1 else 's'}{size}"
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that make a launch use these devices."""
        return (
            f"trainer.nnodes={self.nodes}",
            f"trainer.n_gpus_per_node={self.trainer // self.nodes}",
            f"sluice.rollout.replicas={self.replicas}",
            *((f"{PLACEMENT_KEY}=auto",) if self.replaces else ()),
        )


def _counted_verb(devices: int, verb: str) -> str:
    return f"{devices} {verb}{'s' if devices == 1 else ''}"


def is_colocated(config: RunConfig, settings: KeySettings) -> bool:
    """Return whether the named devices must serve both trainer and rollouts.

    One device alone is the trainer's, since it cannot be divided.
    """
    if config.sluice.placement != "auto":
        return True
    if world_size(config) == 1 or settings.is_set("sluice.rollout.replicas"):
        return False
    return not settings.integer_or_none("actor_rollout_ref.rollout.nnodes")  # verl's 0: colocated


def device_split(
    config: RunConfig, settings: KeySettings, shape: ModelShape | None, device: DeviceKind
) -> DeviceSplit:
    """Return the split of a launch: as its keys or ``sluice.placement`` say, else `auto_split`.

    Raises:
        ConfigError: no split is possible, or the placement does not fit this launch.
    """
    if not is_colocated(config, settings):
        return named_split(config)
    if config.sluice.placement != "auto":
        return _requested_split(config, _possible_splits(config))
    return auto_split(config, shape, device)


def named_split(config: RunConfig) -> DeviceSplit:
    """Return the split of a launch whose keys name ranks and replicas."""
    per_replica = replica_devices(config)
    devices = per_replica * config.sluice.rollout.replicas
    return DeviceSplit(world_size(config), devices, config.trainer.nnodes, per_replica)


def auto_split(config: RunConfig, shape: ModelShape | None, device: DeviceKind) -> DeviceSplit:
    """Return the fastest split by estimate; for a model of unknown shape, the most even split.

    Raises:
        ConfigError: no split is possible.
    """
    candidates = _possible_splits(config)
    if shape is None:
        return min(candidates, key=lambda split: abs(split.trainer - split.rollout))
    train, generate = seconds_per_token(config, shape, device)
    layout = training_layout(config)

    def rank(split: DeviceSplit) -> tuple[float, float]:
        """Return a sort key: what a trainer's device lacks, then the time of a token."""
        shard = split.trainer if layout.shard == layout.world else min(layout.shard, split.trainer)
        split_layout = replace(layout, world=split.trainer, shard=shard)
        guess = guessed_memory(shape, split_layout).peak * _GUESS_MARGIN
        missing = max(0.0, guess - device.usable_bytes)
        return missing, max(train / split.trainer, generate / split.rollout)

    return min(candidates, key=rank)


def _possible_splits(config: RunConfig) -> list[DeviceSplit]:
    candidates = list(splits(config))
    if not candidates:
        raise ConfigError(f"{PLACEMENT_KEY}={config.sluice.placement}: {_no_split_reason(config)}")
    return candidates


def splits(config: RunConfig) -> Iterator[DeviceSplit]:
    """Yield the possible splits: those whose trainer's ranks the layout's sizes divide."""
    for split in _whole_replica_splits(config):
        if _layout_error(config, split.trainer) is None:
            yield split


def _whole_replica_splits(config: RunConfig) -> Iterator[DeviceSplit]:
    """Yield the splits into whole replicas, and a trainer on whole machines or on one."""
    devices, per_node = world_size(config), config.trainer.n_gpus_per_node
    per_replica, replaces = replica_devices(config), config.sluice.placement != "auto"
    for trainer in range(1, devices):
        is_even = trainer <= per_node or trainer % per_node == 0
        nodes = max(1, trainer // per_node)
        # A replica is on one machine.
        beside = max(0, per_node - trainer) // per_replica
        max_replicas = beside + (config.trainer.nnodes - nodes) * (per_node // per_replica)
        if (
            is_even
            and (devices - trainer) % per_replica == 0
            and (devices - trainer) // per_replica <= max_replicas
        ):
            yield DeviceSplit(trainer, devices - trainer, nodes, per_replica, replaces)


def _layout_error(config: RunConfig, trainer: int) -> ConfigError | None:
    try:
        trainer_layout(config, trainer)
    except ConfigError as error:
        return error
    return None


def _no_split_reason(config: RunConfig) -> str:
    """Return why no split is possible, and what to change."""
    devices, per_replica = world_size(config), replica_devices(config)
    pool = f"{devices} device(s) (trainer.nnodes * trainer.n_gpus_per_node)"
    if devices <= per_replica:
        return (
            f"{pool} are too few for a trainer and a replica of {per_replica} devices of their "
            f"own; give at least {per_replica + 1}"
            + (
                ""
                if per_replica == 1
                else ", or a smaller actor_rollout_ref.rollout.tensor_model_parallel_size"
            )
        )
    trainers = [split.trainer for split in _whole_replica_splits(config)]
    if not trainers:
        return (
            f"{pool} do not divide into replicas of {per_replica}, each on one machine, and a "
            "trainer that is a part of a machine, or whole machines of "
            f"{config.trainer.n_gpus_per_node}; change the devices of a replica "
            "(tensor_model_parallel_size * data_parallel_size)"
        )
    return (
        f"beside whole replicas of {per_replica}, {pool} leave the trainer "
        f"{' or '.join(map(str, trainers))}, but with {trainers[-1]}: "
        f"{_layout_error(config, trainers[-1])}"
    )


def seconds_per_token(
    config: RunConfig, shape: ModelShape, device: DeviceKind
) -> tuple[float, float]:
    """Return how long one device takes to train one response token, and to generate one.

    Training takes the operations of all passes. A step of an engine reads its weights, and the keys
    and values of all sequences.
    """
    data, layout = config.data, rollout_layout(config)
    response = data.max_response_length * MEAN_RESPONSE
    tokens = responses_per_step(config) / data.train_batch_size * response
    train = group_flops(config, shape) / tokens / (device.flops * _TRAINING_SHARE)
    weights = engine_weights(shape, layout) * layout.tp
    engine = rollout_memory(shape, layout, device.size)
    context = data.max_prompt_length + response / 2
    fitting = (engine.kv_tokens or 0) / max_row_tokens(data) / MEAN_RESPONSE
    running = max(1.0, min(layout.max_num_seqs, fitting))
    bytes_read = weights + running * context * engine.kv_per_token * layout.tp
    step = bytes_read / (device.memory_rate * _READING_SHARE)
    step = max(step, 2 * shape.active_parameters * running / (device.flops * _TRAINING_SHARE))
    return train, step / running * _samples_per_trained(config)


def _samples_per_trained(config: RunConfig) -> float:
    """Return the number of samples generated per trained sample."""
    rounds = config.data.gen_batch_size or config.data.train_batch_size
    is_filtered = config.algorithm.filter_groups.enable
    return max(1.0, rounds / config.data.train_batch_size) if is_filtered else 1.0


def _requested_split(config: RunConfig, candidates: list[DeviceSplit]) -> DeviceSplit:
    value = config.sluice.placement
    matched = _PLACEMENT.match(value)
    sizes = tuple(map(int, matched.groups())) if matched else None
    matching = [split for split in candidates if (split.trainer, split.rollout) == sizes]
    if not matching:
        choices = "; ".join(f'"{split.placement}"' for split in candidates)
        raise ConfigError(
            f'{PLACEMENT_KEY}="{value}" does not divide the {world_size(config)} devices '
            f"(trainer.nnodes * trainer.n_gpus_per_node) into a trainer and replicas of "
            f"{replica_devices(config)}; give auto, or one of: {choices}"
        )
    return matching[0]
