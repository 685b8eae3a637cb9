"""All memory estimates of one run: trainer and engine, as configured and with one setting
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sluice.config.loading.loader import KeySettings
from sluice.config.memory.layouts import own_training_layout, rollout_layout, verl_training_layout
from sluice.config.memory.rollout import (
    GIB,
    RolloutLayout,
    RolloutMemory,
    rollout_memory,
    smallest_tensor_parallel,
)
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import TrainingLayout, TrainingMemory, training_memory
from sluice.config.run import RunConfig

_SIZES = (1, 2, 4, 8, 16)
_SWITCHES = (
    ("param_offload", "param offload"),
    ("optimizer_offload", "optimizer offload"),
    ("grad_offload", "grad offload"),
    ("streamed_offload", "offload_policy"),
    ("gradient_checkpointing", "checkpointing"),
)


def training_variants(
    shape: ModelShape, layout: TrainingLayout
) -> Iterator[tuple[str, TrainingLayout]]:
    """The layout itself, then each switch turned, then other parallel sizes that are possible."""
    yield "as configured", layout
    for field, name in _SWITCHES:
        if _applies(field, layout):
            value = not getattr(layout, field)
            yield f"{name} {'on' if value else 'off'}", _with(layout, field, value)
    yield from _fsdp_sizes(shape, layout) if layout.backend == "fsdp" else ()
    yield from _megatron_sizes(shape, layout) if layout.backend == "megatron" else ()


def rollout_variants(
    shape: ModelShape, layout: RolloutLayout
) -> Iterator[tuple[str, RolloutLayout]]:
    """The engine itself, then with other tensor parallel sizes that divide the heads."""
    yield f"TP {layout.tp} (as configured)", layout
    for size in _SIZES:
        if size != layout.tp and shape.heads % size == 0:
            yield f"TP {size}", replace(layout, tp=size, ep=size if layout.ep > 1 else 1)


def _with(layout: TrainingLayout, field: str, value: int) -> TrainingLayout:
    changes: dict[str, Any] = {field: value}
    return replace(layout, **changes)


def _applies(field: str, layout: TrainingLayout) -> bool:
    if field == "grad_offload":
        return layout.backend == "megatron"
    if field == "streamed_offload":
        return layout.backend == "fsdp"
    return layout.backend != "replicated" or field == "gradient_checkpointing"


def _fsdp_sizes(shape: ModelShape, layout: TrainingLayout) -> Iterator[tuple[str, TrainingLayout]]:
    for world in (layout.world // 2, layout.world * 2):
        if world and world % layout.sp == 0:
            shard = world if layout.shard == layout.world else min(layout.shard, world)
            yield f"FSDP world {world}", replace(layout, world=world, shard=shard)
    for size in _SIZES:
        possible = shape.heads % size == 0 and layout.world % size == 0
        if size != layout.sp and possible:
            tokens = -(-layout.micro_tokens * layout.sp // size)
            yield f"sp {size}", replace(layout, sp=size, micro_tokens=tokens)


def _megatron_sizes(
    shape: ModelShape, layout: TrainingLayout
) -> Iterator[tuple[str, TrainingLayout]]:
    """Sizes whose product divides the world; the model must divide too, where it decides."""
    limits: tuple[tuple[str, Callable[[int], bool]], ...] = (
        ("tp", lambda size: shape.heads % size == 0),
        ("pp", lambda size: size <= shape.layers),
        ("ep", lambda size: shape.experts > 0 and shape.experts % size == 0),
    )
    for field, possible in limits:
        for size in _SIZES:
            if size == getattr(layout, field) or not possible(size):
                continue
            other = _with(layout, field, size)
            if _divides(other):
                yield f"{field.upper()} {size}", other


def _divides(layout: TrainingLayout) -> bool:
    dense = layout.tp * layout.pp * layout.cp
    experts = layout.ep * layout.etp * layout.pp
    return layout.world % dense == 0 and layout.world % experts == 0


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
