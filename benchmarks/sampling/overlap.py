"""Measure pacing and generating ahead at S = 1, on the simulator's mixtures: medians over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from benchmarks.sampling.simulated import BATCH, FLEET, GEN_BATCH, GROUP, TRAINER
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.simulate.result import SimulationResult, simulate
from sluice.simulate.settings import SimulationSettings, TrainerSettings
from sluice.simulate.workload import MIXTURES, mixture_workload

AHEAD_SHARES = (0.25, 0.5, 1.0)
TRAIN_S = (60.0, 200.0, 400.0)
"""Seconds that a batch takes to train. To draw one takes the fleet about 190 to 250."""

Figures = dict[str, float]


def simulate_pacing(seeds: Sequence[int], steps: int) -> Figures:
    """Return, by mixture, seconds of a step in the order of issue over those of a paced run."""
    found = by_mixture(partial(_pacing, steps), seeds)
    return {mixture: figures["speedup"] for mixture, figures in found.items()}


def simulate_ahead(seeds: Sequence[int], steps: int) -> dict[str, Figures]:
    """Return figures by mixture, for a trainer of t seconds and `ahead_share` x.

    `speedup_t_x` is the ratio of a synchronous step's seconds to those of a step at S = 1;
    `staleness_t_x` the mean of trained samples, in versions.
    """
    return by_mixture(partial(_ahead, steps), seeds)


def by_mixture(
    measure: Callable[[tuple[str, int]], Figures], seeds: Sequence[int]
) -> dict[str, Figures]:
    """Return, by mixture, medians over seeds of what `measure` finds."""
    runs = [(mixture, seed) for mixture in MIXTURES for seed in seeds]
    with ProcessPoolExecutor() as pool:
        measured = list(pool.map(measure, runs))
    found = {}
    for mixture in MIXTURES:
        of_mixture = [one for run, one in zip(runs, measured, strict=True) if run[0] == mixture]
        found[mixture] = {
            name: round(statistics.median(figures[name] for figures in of_mixture), 3)
            for name in of_mixture[0]
        }
    return found


def _pacing(steps: int, run: tuple[str, int]) -> Figures:
    plain = simulate_stream(run, steps, paces=False)
    return {"speedup": plain.step_s / simulate_stream(run, steps).step_s}


def _ahead(steps: int, run: tuple[str, int]) -> Figures:
    found = {}
    for train_s in TRAIN_S:
        trainer = replace(TRAINER, train_s=train_s)
        synchronous = simulate_stream(run, steps, trainer, max_staleness=0)
        for share in AHEAD_SHARES:
            result = simulate_stream(run, steps, trainer, ahead_share=share)
            found[f"speedup_{train_s:g}_{share:g}"] = synchronous.step_s / result.step_s
            found[f"staleness_{train_s:g}_{share:g}"] = result.staleness_mean
    return found


def simulate_stream(
    run: tuple[str, int], steps: int, trainer: TrainerSettings = TRAINER, **changes: object
) -> SimulationResult:
    """Simulate `stream` at S = 1, with `changes` of its rules."""
    mixture, seed = run
    rules = SamplingRules(StrategyName.STREAM, BATCH, 1, GROUP, GEN_BATCH, seed=seed)
    rules = replace(rules, **changes)  # type: ignore[arg-type]
    settings = SimulationSettings(rules, fleet=FLEET, trainer=trainer, num_steps=steps, seed=seed)
    return simulate(settings, mixture_workload(mixture, seed))
