"""Simulate the strategies on the mixtures: medians over seeds."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.simulate.settings import FleetSettings, SimulationSettings, TrainerSettings
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
    deviation of one seed's share of ``stream`` over their mean: what a seed alone says is no more
    certain than that.
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
    """Simulate all strategies on all mixtures; print a table."""
    sys.stdout.write(f"simulating {', '.join(MIXTURES)}, seeds {list(seeds)}\n")
    sys.stdout.flush()
    pairs = [(mixture, seed) for mixture in MIXTURES for seed in seeds]
    with ProcessPoolExecutor() as pool:
        runs = list(pool.map(_compare, *zip(*pairs, strict=True), [steps] * len(pairs)))
    figures = {
        mixture: _figures(
            [run for (name, _), run in zip(pairs, runs, strict=True) if name == mixture]
        )
        for mixture in MIXTURES
    }
    Console(width=160).print(_table(figures))
    return figures


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


def _table(figures: Mapping[str, SimulatedFigures]) -> Table:
    table = Table(
        title="generated / trained tokens (ratio to rounds), hard share / stream's [worst seed]"
    )
    strategies = list(next(iter(figures.values())).gen_per_trained)
    for column in ("mixture", *strategies, "fill time, rounds / stream"):
        table.add_column(column, justify="left" if column == "mixture" else "right")
    for mixture, found in figures.items():
        base = found.gen_per_trained["rounds"]
        cells = [
            f"{found.gen_per_trained[name]:.2f} ({found.gen_per_trained[name] / base:.2f}), "
            f"{found.hard_share_ratio.get(name, float('nan')):.2f} "
            f"[{found.hard_share_ratio_worst.get(name, float('nan')):.2f}]"
            for name in strategies
        ]
        table.add_row(mixture, *cells, f"{found.fill_time_ratio_stream:.2f}")
    return table
