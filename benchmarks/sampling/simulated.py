"""Simulate the strategies on the mixtures: medians over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.simulate.result import ComparedStrategy, SimulationResult, compare, simulate
from sluice.simulate.settings import (
    IDEAL_TRAINER,
    FleetSettings,
    SimulationSettings,
    TrainerSettings,
)
from sluice.simulate.workload import MIXTURES, mixture_workload

BATCH, GROUP, STALENESS = 64, 16, 4
GEN_BATCH = BATCH
"""Prompts of a wave of `rounds`: verl's default (`data.gen_batch_size=null`)."""

FLEET = FleetSettings(num_replicas=8, slots=128)
TRAINER = TrainerSettings(train_s=60.0, spread_s=5.0)
_FIGURES = (
    "gen_per_trained",
    "fill_time_ratio_stream",
    "hard_share_ratio",
    "hard_share_ratio_worst",
    "hard_share_spread",
)

Figures = dict[str, float]


def strategies(seeds: Sequence[int], steps: int) -> dict[str, object]:
    """Simulate all strategies on all mixtures; return figures by mixture, and of all mixtures.

    Ratios are to ``rounds`` (times, tokens) or ``stream`` (hard prompts). `hard_share_ratio` is of
    the shares of all seeds together. `hard_share_spread` is the standard deviation of one seed's
    share of ``stream`` over their mean: one seed alone is no more certain than that.
    """
    pairs = [(mixture, seed) for mixture in MIXTURES for seed in seeds]
    with ProcessPoolExecutor() as pool:
        compared = list(pool.map(_compare, *zip(*pairs, strict=True), [steps] * len(pairs)))
    runs: dict[str, list[Mapping[str, ComparedStrategy]]] = {mixture: [] for mixture in MIXTURES}
    for (mixture, _), run in zip(pairs, compared, strict=True):
        runs[mixture].append(run)
    ours = [name for name in compared[0] if name != StrategyName.ROUNDS.value]
    waiting = [run[name].result for run in compared for name in ours]
    figures = {mixture: _figures(of_mixture, ours) for mixture, of_mixture in runs.items()}
    return {
        **{name: {mixture: each[name] for mixture, each in figures.items()} for name in _FIGURES},
        "surplus_discarded": sum(result.num_kept_discarded for result in waiting),
        "staleness_exceeded": sum(result.num_staleness_exceeded for result in waiting),
        "tokens_discarded_wait": sum(result.accounts["stale"] for result in waiting),
        "long_prompt_ratio": min(result.long_prompt_ratio for result in waiting),
    }


def _compare(mixture: str, seed: int, steps: int) -> dict[str, ComparedStrategy]:
    rules = SamplingRules(StrategyName.STREAM, BATCH, STALENESS, GROUP, GEN_BATCH, seed=seed)
    settings = SimulationSettings(rules, fleet=FLEET, trainer=TRAINER, num_steps=steps, seed=seed)
    found = compare(settings, lambda: mixture_workload(mixture, seed))
    return {compared.result.strategy: compared for compared in found}


def _figures(
    runs: Sequence[Mapping[str, ComparedStrategy]], ours: Sequence[str]
) -> dict[str, object]:
    return {
        "gen_per_trained": {
            name: _median(run[name].result.gen_per_trained for run in runs) for name in runs[0]
        },
        "fill_time_ratio_stream": _median(run["stream"].fill_speedup for run in runs),
        "hard_share_ratio": {name: _ratio_of_means(runs, name) for name in ours},
        "hard_share_ratio_worst": {
            name: _farthest_from_one([run[name].hard_share_ratio for run in runs]) for name in ours
        },
        "hard_share_spread": _spread([run["stream"].result.hard_share for run in runs]),
    }


def _ratio_of_means(runs: Sequence[Mapping[str, ComparedStrategy]], name: str) -> float:
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


def on_policy(steps: int, run: tuple[str, int]) -> Figures:
    """Return figures at S = 0, for ``exact`` and ``expected`` batches of `stream`.

    `fill_speedup_*` is the ratio of the seconds that a batch of ``rounds`` takes to fill to theirs,
    `tokens_ratio_*` theirs of generated tokens to those of ``rounds`` for as many batches,
    `long_prompt_ratio_*` the share of long prompts among the trained over that among the issued.
    """
    simulated = partial(_stream, run, steps, IDEAL_TRAINER, max_staleness=0)
    waves = simulated(strategy=StrategyName.ROUNDS)
    exact, expected = simulated(), simulated(on_policy_fill="expected")
    figures: Figures = {}
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
