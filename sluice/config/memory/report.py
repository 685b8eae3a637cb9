"""The memory estimate of one run: trainer and engine, as verl lays them out and as sluice does."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config.loading.loader import KeySettings
from sluice.config.memory.layouts import own_training_layout, rollout_layout, verl_training_layout
from sluice.config.memory.rollout import (
    GIB,
    RolloutMemory,
    rollout_memory,
    smallest_tensor_parallel,
)
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import TrainingMemory, training_memory
from sluice.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Estimates for each device.

    Attributes:
        backend: how verl would lay the trainer out: fsdp or megatron.
        training: the trainer as verl would lay it out.
        own_training: the trainer as sluice lays it out.
        smallest_tp: by verl's fit rule; `None` without `device_bytes`, or if no size is enough.
    """

    parameters: int
    active_parameters: int
    backend: str
    device_bytes: float | None
    training: TrainingMemory
    own_training: TrainingMemory
    rollout: RolloutMemory
    tp: int
    smallest_tp: int | None


def memory_report(
    config: RunConfig, settings: KeySettings, shape: ModelShape, device_gib: float | None
) -> MemoryReport:
    """Estimate the memory of each device.

    Args:
        settings: the keys as the user set them.
        shape: the trained model's.
        device_gib: memory of one device, GiB; `None`: unknown, so nothing is compared with it.
    """
    layout, engine = verl_training_layout(config, settings), rollout_layout(config)
    device = None if device_gib is None else device_gib * GIB
    smallest = None
    if device is not None:
        smallest = smallest_tensor_parallel(shape, device, engine.utilization)
    return MemoryReport(
        parameters=shape.total_parameters,
        active_parameters=shape.active_parameters,
        backend=layout.backend,
        device_bytes=device,
        training=training_memory(shape, layout),
        own_training=training_memory(shape, own_training_layout(config)),
        rollout=rollout_memory(shape, engine, device),
        tp=engine.tp,
        smallest_tp=smallest,
    )
