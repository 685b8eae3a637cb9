"""All estimates of one run: trainer and engine, as configured and with one thing changed."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config.key_settings import KeySettings
from sluice.config.memory.layout_reading import (
    own_training_layout,
    rollout_layout,
    verl_training_layout,
)
from sluice.config.memory.model_shape import ModelShape
from sluice.config.memory.rollout_memory import (
    GIB,
    RolloutMemory,
    rollout_memory,
    smallest_tensor_parallel,
)
from sluice.config.memory.training_memory import TrainingMemory, training_memory
from sluice.config.memory.variants import rollout_variants, training_variants
from sluice.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Estimates; the first row of `training` and of `rollout` is the configuration itself.

    Args:
        own_training: the trainer as sluice lays it out.
        smallest_tp: by the guide's fit rule; `None` without `device_bytes`, or if none is enough.
    """

    parameters: int
    active_parameters: int
    backend: str
    device_bytes: float | None
    training: tuple[tuple[str, TrainingMemory], ...]
    own_training: TrainingMemory
    rollout: tuple[tuple[str, RolloutMemory], ...]
    smallest_tp: int | None


def memory_report(
    config: RunConfig, settings: KeySettings, shape: ModelShape, device_gib: float | None
) -> MemoryReport:
    """Estimates the memory of each device.

    Args:
        settings: the keys as the user set them.
        shape: the trained model's.
        device_gib: memory of one device, GiB; `None`: unknown, so nothing is compared with it.
    """
    layout, engine = verl_training_layout(config, settings), rollout_layout(config, settings)
    device = None if device_gib is None else device_gib * GIB
    return MemoryReport(
        parameters=shape.total_parameters,
        active_parameters=shape.active_parameters,
        backend=layout.backend,
        device_bytes=device,
        training=tuple(
            (name, training_memory(shape, one)) for name, one in training_variants(shape, layout)
        ),
        own_training=training_memory(shape, own_training_layout(config)),
        rollout=tuple(
            (name, rollout_memory(shape, one, device))
            for name, one in rollout_variants(shape, engine)
        ),
        smallest_tp=None
        if device is None
        else smallest_tensor_parallel(shape, device, engine.utilization),
    )
