"""All strategies on one workload and fleet: times to fill a batch, and whole runs side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice.algorithm.sampling.rules import StrategyName
from sluice.simulate.result import SimulationResult, simulate
from sluice.simulate.settings import IDEAL_TRAINER, SimulationSettings
from sluice.simulate.workload import Workload

OpenWorkload = Callable[[], Workload]


def simulate_fill_times(
    settings: SimulationSettings,
    workload: Workload,
    on_step: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Simulate a run with a trainer that takes no time, whose steps are the times to fill a batch.

    Args:
        settings: the run's own; its trainer is replaced.
        workload: the data set and its answers.
        on_step: gets the number of batches leased so far.

    Raises:
        BatchUnfillableError: the workload is hopeless, or the strategy's limit was reached.
    """
    ideal = replace(settings, trainer=IDEAL_TRAINER)
    return simulate(ideal, workload, on_step=on_step)


@dataclass(frozen=True, slots=True)
class Compared:
    """One strategy.

    Args:
        result: with the trainer as it is.
        fill: with a trainer that takes no time; its steps are the times to fill a batch.
        fill_speedup: time that ``rounds`` takes to fill a batch over the time of this strategy.
        gen_ratio: `gen_per_trained` over the value of ``rounds``.
        step_speedup: seconds of a step of ``rounds`` over those of this strategy.
        hard_share_ratio: `hard_share` over that of ``stream``.
    """

    result: SimulationResult
    fill: SimulationResult
    fill_speedup: float
    gen_ratio: float
    step_speedup: float
    hard_share_ratio: float


def compare(
    settings: SimulationSettings,
    open_workload: OpenWorkload,
    on_step: Callable[[int], None] | None = None,
) -> tuple[Compared, ...]:
    """Simulate each strategy twice: with the trainer, and with one that takes no time.

    Args:
        settings: of all; ``rounds`` is simulated synchronously (S = 0), as it runs.
        open_workload: the same data set for each.
        on_step: called after each step of each simulation.

    Raises:
        BatchUnfillableError: the workload is hopeless.
    """
    pairs = {}
    for name in StrategyName:
        real = of_strategy(settings, name)
        result = simulate(real, open_workload(), on_step=on_step)
        pairs[name] = (result, simulate_fill_times(real, open_workload(), on_step))
    base, base_fill = pairs[StrategyName.ROUNDS]
    plain, _ = pairs[StrategyName.STREAM]
    return tuple(
        Compared(
            result,
            fill,
            fill_speedup=base_fill.step_s / fill.step_s,
            gen_ratio=result.gen_per_trained / base.gen_per_trained,
            step_speedup=base.step_s / result.step_s,
            hard_share_ratio=result.hard_share / plain.hard_share if plain.hard_share else 1.0,
        )
        for result, fill in pairs.values()
    )


def of_strategy(settings: SimulationSettings, name: StrategyName) -> SimulationSettings:
    """Return the same run with another strategy; ``rounds`` is synchronous."""
    bound = 0 if name is StrategyName.ROUNDS else settings.rules.max_staleness
    return replace(settings, rules=replace(settings.rules, strategy=name, max_staleness=bound))
