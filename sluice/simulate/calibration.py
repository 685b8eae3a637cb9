"""Step times that make a simulated replica as fast as the real one was.

A record does not say how many sequences ran at each moment, so that step times read off it are a
little wrong. Tokens per busy second are recorded exactly: the simulation is run a few times, and
the step times are scaled until it has the same. How fast a busy fleet is, is thereby given; when it
is busy is what the simulation finds.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.simulate.fit import FittedRun, tokens_per_busy_s
from sluice.simulate.fitted_workload import FittedWorkload
from sluice.simulate.recorder import Recorder
from sluice.simulate.result import simulate
from sluice.simulate.settings import FleetSettings, SimulationSettings

NUM_ROUNDS = 3


def calibrated(fitted: FittedRun, settings: SimulationSettings) -> SimulationSettings:
    """The settings with step times scaled to the run's tokens per busy second.

    Args:
        fitted: the run.
        settings: of its simulation.

    Raises:
        BatchUnfillableError: the workload is hopeless.
    """
    measured = tokens_per_busy_s(fitted.record)
    if measured is None:
        return settings
    for _ in range(NUM_ROUNDS):
        recorder = Recorder()
        workload = FittedWorkload(fitted.groups, settings.seed)
        simulate(settings.as_issued(), workload, recorder)
        last = recorder.steps[-1]
        scale = last.generated / last.busy_s / measured
        settings = replace(settings, fleet=_scaled(settings.fleet, scale))
    return settings


def _scaled(fleet: FleetSettings, factor: float) -> FleetSettings:
    return replace(
        fleet,
        base_step_s=fleet.base_step_s * factor,
        per_sequence_s=fleet.per_sequence_s * factor,
    )
