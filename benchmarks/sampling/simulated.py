"""Simulate the strategies on the mixtures: medians over seeds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.simulate.result import SimulationResult, simulate
from sluice.simulate.settings import (
    IDEAL_TRAINER,
    FleetSettings,
    SimulationSettings,
    TrainerSettings,
)
from sluice.simulate.strategies import Compared, compare
from sluice.simulate.workload import MIXTURES, mixture_workload

BATCH, GROUP, STALENESS = 64, 16, 4
GEN_BATCH = BATCH
"""Prompts of a wave of `rounds`: verl's default (`data.gen_batch_size=null`)."""

FLEET = FleetSettings(num_replicas=8, slots=128)
TRAINER = TrainerSettings(train_s=60.0, spread_s=5.0)


@dataclass(frozen=True, slots=True)
class SimulatedFigures:
    """One mixture; ratios are to ``rounds`` (times, tokens) or ``stream`` (hard prompts).

    `hard_share_ratio` is of the shares of all seeds together. `hard_share_spread` is the standard
    deviation of one seed's share of ``stream`` over their mean: one seed alone is no more certain
    than that.
    """

    gen_per_trained: Mapping[str, float]
    fill_time_ratio_stream: float
    surplus_discarded: int
    staleness_exceeded: int
    tokens_discarded_wait: float
    long_prompt_ratio: float
    hard_share_ratio: Mapping[str, float]
    hard_share_ratio_worst: Mapping[str, float]
    hard_share_spread: float


def simulate_mixtures(seeds: Sequence[int], steps: int) -> dict[str, SimulatedFigures]:
    """Simulate all strategies on all mixtures."""
    pairs = [(mixture, seed) for mixture in MIXTURES for seed in seeds]
    with ProcessPoolExecutor() as pool:
        runs = list(pool.map(_compare, *zip(*pairs, strict=True), [steps] * len(pairs)))
    return {
        mixture: _figures(
            [run for (name, _), run in zip(pairs, runs, strict=True) if name == mixture]
        )
        for mixture in MIXTURES
    }


def _compare(mixture: str, seed: int, steps: int) -> dict[str, Compared]:
    rules = SamplingRules(StrategyName.STREAM, BATCH, STALENESS, GROUP, GEN_BATCH, seed=seed)
    settings = SimulationSettings(rules, fleet=FLEET, trainer=TRAINER, num_steps=steps, seed=seed)
    found = compare(settings, lambda: mixture_workload(mixture, seed))
    return {compared.result.strategy: compared for compared in found}


def _figures(runs: Sequence[Mapping[str, Compared]]) -> SimulatedFigures:
    ours = [name for name in runs[0] if name != StrategyName.ROUNDS.value]
    waiting = [run[name].result for run in runs for name in ours]
    return SimulatedFigures(
        gen_per_trained={
            name: _median(run[name].result.gen_per_trained for run in runs) for name in runs[0]
        },
        fill_time_ratio_stream=_median(run["stream"].fill_speedup for run in runs),
        surplus_discarded=sum(result.num_kept_discarded for result in waiting),
        staleness_exceeded=sum(result.num_staleness_exceeded for result in waiting),
        tokens_discarded_wait=sum(result.accounts["stale"] for result in waiting),
        long_prompt_ratio=min(result.long_prompt_ratio for result in waiting),
        hard_share_ratio={name: _ratio_of_means(runs, name) for name in ours},
        hard_share_ratio_worst={
            name: _farthest_from_one([run[name].hard_share_ratio for run in runs]) for name in ours
        },
        hard_share_spread=_spread([run["stream"].result.hard_share for run in runs]),
    )


def _ratio_of_means(runs: Sequence[Mapping[str, Compared]], name: str) -> float:
    """Return the hard share over that of ``stream``: every seed trains equally many groups."""
    plain = statistics.fmean(run["stream"].result.hard_share for run in runs)
    return round(statistics.fmean(run[name].result.hard_share for run in runs) / plain, 3)


def _spread(shares: Sequence[float]) -> float:
    return round(statistics.stdev(shares) / statistics.fmean(shares), 3) if shares[1:] else 0.0


def _farthest_from_one(ratios: Sequence[float]) -> float:
    distances = [abs(ratio - 1.0) for ratio in ratios]
    return round(ratios[distances.index(max(distances))], 3)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


AHEAD_SHARES = (0.25, 0.5, 1.0)
# Seconds that a batch takes to train. To sample one takes the fleet about 190 to 250.
TRAIN_S = (60.0, 200.0, 400.0)
Figures = dict[str, float]


def by_mixture(
    measure: Callable[[int, tuple[str, int]], Figures], seeds: Sequence[int], steps: int
) -> dict[str, Figures]:
    """Return, by mixture, medians over seeds of what `measure` finds."""
    runs = [(mixture, seed) for mixture in MIXTURES for seed in seeds]
    with ProcessPoolExecutor() as pool:
        measured = list(pool.map(partial(measure, steps), runs))
    found = {}
    for mixture in MIXTURES:
        of_mixture = [one for run, one in zip(runs, measured, strict=True) if run[0] == mixture]
        found[mixture] = {
            name: _median(figures[name] for figures in of_mixture) for name in of_mixture[0]
        }
    return found


def pacing(steps: int, run: tuple[str, int]) -> Figures:
    """Return the seconds of a step in the order of issue over those of a paced run, at S = 1."""
    plain = _stream(run, steps, paces=False)
    return {"speedup": plain.step_s / _stream(run, steps).step_s}


def ahead(steps: int, run: tuple[str, int]) -> Figures:
    """Return figures at S = 1, for a trainer of t seconds and `ahead_share` x.

    `speedup_t_x` is the ratio of a synchronous step's seconds to those of a step at S = 1;
    `staleness_t_x` the mean of trained samples, in versions.
    """
    found = {}
    for train_s in TRAIN_S:
        trainer = replace(TRAINER, train_s=train_s)
        synchronous = _stream(run, steps, trainer, max_staleness=0)
        for share in AHEAD_SHARES:
            result = _stream(run, steps, trainer, ahead_share=share)
            found[f"speedup_{train_s:g}_{share:g}"] = synchronous.step_s / result.step_s
            found[f"staleness_{train_s:g}_{share:g}"] = result.staleness_mean
    return found


def on_policy(steps: int, run: tuple[str, int]) -> Figures:
    """Return figures at S = 0, for ``exact`` and ``expected`` batches of `stream`.

    `fill_speedup_*` is the ratio of the seconds that a batch of ``rounds`` takes to fill to theirs,
    `tokens_ratio_*` theirs of generated tokens to those of ``rounds`` for as many batches,
    `withdrawn_share_expected` the share of all tokens that preempted groups took,
    `long_prompt_ratio_*` the share of long prompts among the trained over that among the issued,
    `hard_share_ratio_expected` the share of hard prompts over that of exact batches.
    """
    simulated = partial(_stream, run, steps, IDEAL_TRAINER, max_staleness=0)
    waves = simulated(strategy=StrategyName.ROUNDS)
    exact, expected = simulated(), simulated(on_policy_fill="expected")
    figures = {
        "withdrawn_share_expected": expected.accounts["withdrawn"] / expected.accounts["generated"],
        "hard_share_ratio_expected": expected.hard_share / exact.hard_share,
    }
    for name, one in (("exact", exact), ("expected", expected)):
        tokens = one.accounts["generated"] / waves.accounts["generated"]
        figures |= {
            f"fill_speedup_{name}": waves.step_s / one.step_s,
            f"tokens_ratio_{name}": tokens,
            f"long_prompt_ratio_{name}": one.long_prompt_ratio,
        }
    return figures


def _stream(
    run: tuple[str, int], steps: int, trainer: TrainerSettings = TRAINER, **changes: object
) -> SimulationResult:
    """Simulate `stream` at S = 1, with `changes` of its rules."""
    mixture, seed = run
    rules = SamplingRules(StrategyName.STREAM, BATCH, 1, GROUP, GEN_BATCH, seed=seed)
    rules = replace(rules, **changes)  # type: ignore[arg-type]
    settings = SimulationSettings(rules, fleet=FLEET, trainer=trainer, num_steps=steps, seed=seed)
    return simulate(settings, mixture_workload(mixture, seed))


def simulator_speed() -> tuple[float, int]:
    """Simulate `stream` on 1,024 replicas with 32 slots; return seconds and samples.

    One process, one core. Of the two simulations that `sluice simulate --strategy stream --replicas
    1024 --slots 32 --batch-size 512 --steps 70` makes, it is the one with the trainer.
    """
    rules = SamplingRules(StrategyName.STREAM, 512, 4, GROUP, 512)
    fleet = FleetSettings(num_replicas=1024, slots=32)
    began_s = time.perf_counter()
    result = simulate(SimulationSettings(rules, fleet=fleet, num_steps=70), mixture_workload("mid"))
    return time.perf_counter() - began_s, result.num_samples
