"""The figures of a simulation, and those of all strategies side by side.

All but `accounts`, `num_kept_discarded` and what counts violations are taken from the lease of the
last batch of the warm-up to the lease of the last batch. The groups carried over from batch to
batch are the same at both ends, so they cancel out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from sluice.algorithm.sampling.rules import StrategyName
from sluice.simulate.loop import SimulatedLoop
from sluice.simulate.recorder import Issue, SimulationRecorder, TokenCause
from sluice.simulate.settings import IDEAL_TRAINER, SimulationSettings
from sluice.simulate.workload import Workload

OpenWorkload = Callable[[], Workload]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one strategy on a fleet and a workload.

    Args:
        strategy: its name.
        num_steps: batches that the figures are of.
        gen_per_trained: generated over trained response tokens.
        step_s: seconds of a step, from the lease of one batch to the lease of the next: mean. The
            trainer's part is in it; where the trainer takes no time, it is the time to fill a batch
            (`simulate_fill_times`).
        step_s_p50: its median.
        step_s_p99: its 99th percentile.
        steps_per_hour: steps at that rate.
        trainer_idle_share: share of the time that the trainer waited for a batch.
        fleet_idle_share: share of the time that a replica sampled nothing, mean over replicas.
        slots_used_share: share of slots in use, mean over time.
        staleness_mean: versions that a trained sample's oldest token is behind.
        staleness_p99: its 99th percentile.
        staleness_max: its maximum.
        num_staleness_exceeded: trained samples beyond the bound.
        num_kept_discarded: kept groups that were never trained, as surplus or as stale.
        discarded_share: their share of all kept groups that were trained or discarded.
        num_restarted: running groups that were broken off and began again.
        long_prompt_ratio: of the issued groups that turned out mixed: share that was trained, for
            long prompts over all. 1: scheduling does not favour short ones.
        hard_share: share of hard prompts among trained groups.
        num_samples: samples asked of replicas in the whole run.
        accounts: response tokens of the whole run by what became of them. `pending` is of groups
            that run or wait for a batch; `generated` is counted by the replicas.
    """

    strategy: str
    num_steps: int
    gen_per_trained: float
    step_s: float
    step_s_p50: float
    step_s_p99: float
    steps_per_hour: float
    trainer_idle_share: float
    fleet_idle_share: float
    slots_used_share: float
    staleness_mean: float
    staleness_p99: float
    staleness_max: int
    num_staleness_exceeded: int
    num_kept_discarded: int
    discarded_share: float
    num_restarted: int
    long_prompt_ratio: float
    hard_share: float
    num_samples: int
    accounts: dict[str, float]


def simulate(
    settings: SimulationSettings,
    workload: Workload,
    recorder: SimulationRecorder | None = None,
    on_step: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Simulate one run.

    Args:
        settings: the fleet, the trainer and the rules.
        workload: the data set and its answers.
        recorder: counts; give one to look at it afterwards.
        on_step: gets the number of batches leased so far.

    Raises:
        BatchUnfillableError: the workload is hopeless, or the strategy's limit was reached.
    """
    recorder = recorder or SimulationRecorder()
    loop = SimulatedLoop(settings, workload, recorder, on_step)
    loop.run()
    return _result(settings, recorder, loop)


def _result(
    settings: SimulationSettings, recorder: SimulationRecorder, loop: SimulatedLoop
) -> SimulationResult:
    first_mark, last_mark = recorder.marks[settings.num_warmup], recorder.marks[-1]
    seconds, num_replicas = last_mark.time_s - first_mark.time_s, settings.fleet.num_replicas
    steps_s = np.diff([mark.time_s for mark in recorder.marks[settings.num_warmup :]])
    step_s = float(steps_s.mean())
    replica_s = max(seconds * num_replicas, 1e-12)
    staleness = _spread(recorder.staleness)
    bound = settings.rules.max_staleness
    return SimulationResult(
        strategy=settings.rules.strategy.value,
        num_steps=len(steps_s),
        gen_per_trained=(last_mark.generated - first_mark.generated)
        / (last_mark.trained - first_mark.trained),
        step_s=step_s,
        step_s_p50=float(np.quantile(steps_s, 0.5)),
        step_s_p99=float(np.quantile(steps_s, 0.99)),
        steps_per_hour=3600.0 / max(step_s, 1e-12),
        trainer_idle_share=(last_mark.trainer_wait_s - first_mark.trainer_wait_s)
        / max(seconds, 1e-12),
        fleet_idle_share=max(0.0, 1.0 - (last_mark.busy_s - first_mark.busy_s) / replica_s),
        slots_used_share=(last_mark.slot_s - first_mark.slot_s)
        / (replica_s * settings.fleet.slots),
        staleness_mean=float(staleness.mean()),
        staleness_p99=float(np.quantile(staleness, 0.99, method="higher")),
        staleness_max=int(staleness.max()),
        num_staleness_exceeded=sum(n for v, n in recorder.staleness.items() if v > bound),
        num_kept_discarded=recorder.num_kept_discarded,
        discarded_share=_discarded_share(recorder),
        num_restarted=recorder.num_restarted,
        long_prompt_ratio=_long_prompt_ratio(settings, recorder),
        hard_share=_hard_share(settings, recorder),
        num_samples=loop.num_samples,
        accounts=_accounts(recorder, loop),
    )


def _discarded_share(recorder: SimulationRecorder) -> float:
    discarded, trained = recorder.num_kept_discarded, sum(recorder.num_trained)
    return discarded / (discarded + trained)


def _spread(counts: Counter[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.repeat(np.array(list(counts)), np.array(list(counts.values())))


def _long_prompt_ratio(settings: SimulationSettings, recorder: SimulationRecorder) -> float:
    """Return the ratio for prompts after the warm-up, early enough for the bound to have trained
    them.
    """
    last_version = settings.num_steps - 1 - settings.rules.max_staleness - 1
    cohort = [
        issue
        for issue in recorder.issues.values()
        if issue.is_mixed
        and min(settings.num_warmup, last_version) <= issue.version <= last_version
    ]
    share, long_share = _trained_share(cohort), _trained_share(i for i in cohort if i.is_long)
    return long_share / share if share else 1.0


def _trained_share(issues: Iterable[Issue]) -> float:
    trained = [issue.is_trained for issue in issues]
    return sum(trained) / len(trained) if trained else 1.0


def _hard_share(settings: SimulationSettings, recorder: SimulationRecorder) -> float:
    trained = sum(recorder.num_trained[settings.num_warmup + 1 :])
    return sum(recorder.num_hard[settings.num_warmup + 1 :]) / trained


def _accounts(recorder: SimulationRecorder, loop: SimulatedLoop) -> dict[str, float]:
    by_cause = {cause.value: float(recorder.tokens[cause]) for cause in TokenCause}
    by_cause[TokenCause.STALE.value] += recorder.stale_tokens
    by_cause[TokenCause.PREEMPTED.value] += recorder.preempted_tokens
    return {
        **by_cause,
        "pending": loop.num_pending_tokens(),
        "generated": loop.totals()[0],
    }


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
class ComparedStrategy:
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
) -> tuple[ComparedStrategy, ...]:
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
        real = with_strategy(settings, name)
        result = simulate(real, open_workload(), on_step=on_step)
        pairs[name] = (result, simulate_fill_times(real, open_workload(), on_step))
    base, base_fill = pairs[StrategyName.ROUNDS]
    plain, _ = pairs[StrategyName.STREAM]
    return tuple(
        ComparedStrategy(
            result,
            fill,
            fill_speedup=base_fill.step_s / fill.step_s,
            gen_ratio=result.gen_per_trained / base.gen_per_trained,
            step_speedup=base.step_s / result.step_s,
            hard_share_ratio=result.hard_share / plain.hard_share if plain.hard_share else 1.0,
        )
        for result, fill in pairs.values()
    )


def with_strategy(settings: SimulationSettings, name: StrategyName) -> SimulationSettings:
    """Return the same run with another strategy; ``rounds`` is synchronous."""
    bound = 0 if name is StrategyName.ROUNDS else settings.rules.max_staleness
    return replace(settings, rules=replace(settings.rules, strategy=name, max_staleness=bound))
