"""`global_profiler` and `actor_rollout_ref.actor.profiler`: traces of training steps."""

from __future__ import annotations

from typing import Literal

import msgspec

from sluice.config.schema.section import NonNegativeInt, PositiveInt, Section

ProfilerTool = Literal["torch", "npu", "nsys", "torch_memory", "precision_debugger"]


class GlobalProfilerConfig(Section, frozen=True):
    """Which steps are traced, and where the traces go."""

    tool: ProfilerTool | None = None
    """torch: torch's profiler traces the training steps of the trainer's ranks; none: no traces."""

    steps: list[PositiveInt] | None = None
    """Numbers of the traced steps, from 1; none: no traces."""

    save_path: str = "outputs/profile"
    """Folder of the traces, relative to where the trainer runs."""


class ActorProfilerConfig(Section, frozen=True):
    """Which ranks of the trainer are traced."""

    enable: bool = False
    """Trace this run's global_profiler.steps."""

    tool: ProfilerTool | None = None
    """As global_profiler.tool; none: that one."""

    all_ranks: bool = False
    """Trace every rank."""

    ranks: list[NonNegativeInt] = msgspec.field(default_factory=list)
    """Traced ranks, unless all_ranks is true."""

    save_path: str | None = None
    """As global_profiler.save_path; none: that one."""
