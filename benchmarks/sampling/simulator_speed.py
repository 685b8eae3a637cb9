"""Time the simulator on 1,024 replicas and a million samples."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.simulate.result import simulate
from sluice.simulate.settings import FleetSettings, SimulationSettings
from sluice.simulate.workload import mixture_workload

_BATCH, _STALENESS, _GROUP = 512, 4, 16
_FLEET = FleetSettings(num_replicas=1024, slots=32)
_STEPS = 70
LEAST_SAMPLES = 1_000_000


@dataclass(frozen=True, slots=True)
class SimulatorSpeed:
    """One simulation, timed: seconds by the clock, and samples asked of replicas."""

    seconds: float
    num_samples: int


def measure_simulator(steps: int = _STEPS, least_samples: int = LEAST_SAMPLES) -> SimulatorSpeed:
    """Simulate `stream` on 1,024 replicas with 32 slots, alone: one process, one core.

    Of the two that `sluice simulate --strategy stream --replicas 1024 --slots 32 --batch-size 512
    --steps 70` makes, it is the one with the trainer. Prints a line.

    Raises:
        SystemExit: that took fewer than `least_samples`.
    """
    rules = SamplingRules(StrategyName.STREAM, _BATCH, _STALENESS, _GROUP, _BATCH)
    settings = SimulationSettings(rules, fleet=_FLEET, num_steps=steps)
    began_s = time.perf_counter()
    result = simulate(settings, mixture_workload("mid"))
    found = SimulatorSpeed(time.perf_counter() - began_s, result.num_samples)
    if found.num_samples < least_samples:
        raise SystemExit(
            f"benchmark: {steps} steps took {found.num_samples:,} samples, and {least_samples:,} "
            "are to be timed; raise _STEPS in benchmarks/sampling/simulator_speed.py"
        )
    sys.stdout.write(
        f"simulated {found.num_samples:,} samples on {_FLEET.num_replicas:,} replicas in "
        f"{found.seconds:.1f} s: {found.num_samples / found.seconds:,.0f} a second\n"
    )
    sys.stdout.flush()
    return found
