"""The time to fill a batch: a step of the same run with a trainer that takes no time.

A step with a trainer says how fast a run is, not how fast its batches fill: replicas fill batches
while the trainer works, and stand still while it publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice.simulate.result import SimulationResult, simulate
from sluice.simulate.settings import IDEAL_TRAINER, SimulationSettings
from sluice.simulate.workload import Workload


@dataclass(frozen=True, slots=True)
class FillTimes:
    """Seconds to fill a batch.

    Args:
        ideal: the simulation with a trainer that takes no time, whose steps these are.
    """

    ideal: SimulationResult

    @property
    def mean_s(self) -> float:
        """Mean, seconds."""
        return self.ideal.step_s

    @property
    def p50_s(self) -> float:
        """Median, seconds."""
        return self.ideal.step_s_p50

    @property
    def p99_s(self) -> float:
        """99th percentile, seconds."""
        return self.ideal.step_s_p99


def simulate_fill_times(
    settings: SimulationSettings,
    workload: Workload,
    on_step: Callable[[int], None] | None = None,
) -> FillTimes:
    """Simulates a run with a trainer that takes no time.

    Args:
        settings: the run's own; its trainer is put aside.
        workload: the data set and its answers.
        on_step: told of the number of batches leased so far.

    Raises:
        BatchUnfillableError: the workload is hopeless, or the strategy's limit was reached.
    """
    ideal = replace(settings, trainer=IDEAL_TRAINER)
    return FillTimes(simulate(ideal, workload, on_step=on_step))
