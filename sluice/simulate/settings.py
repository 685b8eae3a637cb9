"""The settings of a simulation: the fleet, the trainer, the rules of the loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sluice.algorithm.groups.staleness import OnStale
from sluice.algorithm.sampling.admission import YieldFloor
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.errors import ConfigError

DEFAULT_STEPS = 240


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Identical replicas.

    Args:
        num_replicas: how many.
        slots: sequences that one generates at once.
        slack: sequences in flight per slot, at most (`sluice.reward.inflight_slack`).
        base_step_s: seconds of a decoding step, however few sequences run.
        per_sequence_s: seconds that each running sequence adds to a step.
        grading_s: seconds from a group's last sample to its grades.
    """

    num_replicas: int = 8
    slots: int = 128
    slack: float = 1.5
    base_step_s: float = 0.02
    per_sequence_s: float = 0.0001
    grading_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.slots * self.slack < 1.0:
            raise ConfigError(
                f"simulated fleet: {self.num_replicas} replicas with {self.slots} slots and slack "
                f"{self.slack:g}; there must be capacity for a sequence"
            )
        delays = (self.base_step_s, self.per_sequence_s, self.grading_s)
        if not all(0.0 <= delay < math.inf for delay in delays) or self.step_s(1) <= 0.0:
            raise ConfigError(
                f"simulated fleet: a decoding step takes {self.base_step_s:g} s and "
                f"{self.per_sequence_s:g} s for each sequence, grading {self.grading_s:g} s; give "
                "finite times (--step-ms, --sequence-ms), none below 0, and a decoding step above 0"
            )

    def step_s(self, num_running: int) -> float:
        """Return the seconds of a decoding step: one token for each of `num_running` sequences."""
        return self.base_step_s + self.per_sequence_s * num_running


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Seconds of a step.

    Args:
        train_s: mean time from a leased batch to its trained weights.
        spread_s: standard deviation of `train_s` (normal, never below 0).
        publish_s: from trained weights to the announcement; at the end of it the replicas swap, in
            turns unless the run is synchronous. It lasts at least as long as their turns.
        stall_s: how long a replica stands still to swap weights.
        handover_s: from a formed batch until the trainer has it, which it waits for.
        overlaps: whether a publication runs beside the next step where staleness leaves it places
            (``sluice.weights.overlap``).
        recorded_s: `train_s` of the first steps, in their order; those after them are random.
    """

    train_s: float = 60.0
    spread_s: float = 0.0
    publish_s: float = 2.0
    stall_s: float = 0.5
    handover_s: float = 0.0
    overlaps: bool = True
    recorded_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        times = (self.train_s, self.spread_s, self.publish_s, self.stall_s, self.handover_s)
        invalid_times = [time for time in (*times, *self.recorded_s) if not 0.0 <= time < math.inf]
        if invalid_times or self.stall_s > self.publish_s:
            raise ConfigError(
                f"simulated trainer: times {(*times, *invalid_times)}; give finite times "
                "(--trainer-s), none below 0, and a stall no longer than the publication that it "
                "is part of"
            )


IDEAL_TRAINER = TrainerSettings(0.0, 0.0, 0.0, 0.0)
"""A trainer that takes no time: a step lasts as long as a batch takes to fill."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """One run.

    Args:
        rules: the strategy, its batch size and staleness.
        on_stale: as `algorithm.staleness` has it.
        fleet: the replicas.
        trainer: the trainer.
        num_steps: batches to train.
        warmup_steps: batches before the figures count, below `num_steps`; ``None``: a third.
        seed: of the workload's samples and the trainer's times.
        filters_groups: whether groups whose samples all have the same metric are thrown away.
        yield_floor: when to give up.
    """

    rules: SamplingRules
    on_stale: OnStale = "wait"
    fleet: FleetSettings = field(default_factory=FleetSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    num_steps: int = DEFAULT_STEPS
    warmup_steps: int | None = None
    seed: int = 0
    filters_groups: bool = True
    yield_floor: YieldFloor = field(default_factory=YieldFloor)

    def __post_init__(self) -> None:
        name = self.rules.strategy
        if not self.filters_groups and name is not StrategyName.STREAM:
            raise ConfigError(
                f"simulation: sluice.sampling.strategy = {name} with "
                "algorithm.filter_groups.enable = false: without the filter every group is "
                "trained, and there is nothing to choose; simulate stream only (leave --compare "
                "out), or record a run with algorithm.filter_groups.enable=true"
            )
        if self.num_steps < 2 or not 0 <= self.num_warmup < self.num_steps - 1:
            raise ConfigError(
                f"simulation: {self.num_steps} steps, {self.num_warmup} of them to warm up; at "
                "least two must be left"
            )

    @property
    def num_warmup(self) -> int:
        """Batches before the figures count."""
        return self.num_steps // 3 if self.warmup_steps is None else self.warmup_steps
