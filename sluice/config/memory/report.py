"""An engine's memory by formulas, and whether a device holds it; a trainer's is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sluice.config.memory.layouts import rollout_layout
from sluice.config.memory.rollout import (
    GIB,
    RolloutMemory,
    fits,
    rollout_memory,
    smallest_tensor_parallel,
)
from sluice.config.memory.shape import ModelShape
from sluice.config.problems import Problem
from sluice.config.run import RunConfig
from sluice.config.verl_sizes import ROLLOUT


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Estimates for each device of an engine.

    Attributes:
        smallest_tp: by the practice guide's rule; `None` without `device_bytes`, or if no size is
            enough.
    """

    parameters: int
    active_parameters: int
    device_bytes: float | None
    rollout: RolloutMemory
    tp: int
    smallest_tp: int | None


def engine_report(config: RunConfig, shape: ModelShape, device_gib: float | None) -> EngineReport:
    """Estimate the memory of each device.

    Args:
        shape: the trained model's.
        device_gib: memory of one device, GiB; `None`: unknown, so nothing is compared with it.
    """
    engine = rollout_layout(config)
    device = None if device_gib is None else device_gib * GIB
    smallest = None
    if device is not None:
        smallest = smallest_tensor_parallel(shape, device, engine.utilization)
    return EngineReport(
        parameters=shape.total_parameters,
        active_parameters=shape.active_parameters,
        device_bytes=device,
        rollout=rollout_memory(shape, engine, device),
        tp=engine.tp,
        smallest_tp=smallest,
    )


def engine_problems(config: RunConfig, shape: ModelShape, device_gib: float) -> Iterator[Problem]:
    """Yield that an engine's share of devices of `device_gib` GiB does not hold the weights."""
    engine, device = rollout_layout(config), device_gib * GIB
    if fits(shape, engine, device):
        return
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    message = (
        f": {device_gib:g} GiB * {ROLLOUT}.gpu_memory_utilization {engine.utilization:g} * "
        f"{engine.tp} cannot hold {shape.total_parameters:,} parameters of 2 bytes"
    )
    smallest = smallest_tensor_parallel(shape, device, engine.utilization)
    found = Problem(key, engine.tp, message, rule="engine-memory")
    if smallest is None:
        message = f"{message}, and neither can any size that divides {shape.heads} heads"
        yield replace(found, message=message, remedy="use larger devices")
    else:
        yield replace(found, overrides=(f"{key}={smallest}",))
