"""Build a simulation from the folder of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sluice.algorithm.sampling.admission import YieldFloor
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.client.run_address import CONFIG_NAME
from sluice.config.derived import on_policy_fill
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.simulate.fitting.fit import FittedRun, FittedWorkload, calibrated, fit_run
from sluice.simulate.fitting.group_records import GROUPS_NAME
from sluice.simulate.settings import SimulationSettings
from sluice.simulate.strategies import OpenWorkload


@dataclass(frozen=True, slots=True)
class FittedSimulation:
    """A run, and what simulates it."""

    run: FittedRun
    settings: SimulationSettings
    open_workload: OpenWorkload


def fitted_simulation(run: Path, steps: int | None, seed: int) -> FittedSimulation:
    """Fits a simulation to a run's record.

    Args:
        run: the run's folder.
        steps: batches to simulate; ``None``: as many as the run has trained.
        seed: of everything random.

    Raises:
        ConfigError: nothing was started from there, or the configuration is not the recorded run's.
        DataError: its record is missing, too short, cannot be read, or is of a strategy that leaves
            samples or prompts out.
    """
    file = run / CONFIG_NAME
    if not file.is_file():
        raise ConfigError(f"--run: {run} holds no {CONFIG_NAME}; give the folder of a started run")
    config = load_config(file, ())
    fitted = fit_run(
        run,
        slots=config.actor_rollout_ref.rollout.max_num_seqs,
        slack=config.sluice.reward.inflight_slack,
    )
    _check_filter(config, fitted, file)
    settings = _settings(config, fitted, steps, seed)
    settings = calibrated(fitted, settings)
    return FittedSimulation(fitted, settings, partial(FittedWorkload, fitted.groups, seed))


def _settings(
    config: RunConfig, fitted: FittedRun, steps: int | None, seed: int
) -> SimulationSettings:
    group_filter = config.algorithm.filter_groups
    return SimulationSettings(
        _rules(config, seed),
        on_stale=config.sluice.asynchrony.on_stale,
        fleet=fitted.fleet,
        trainer=fitted.trainer,
        num_steps=max(2, steps or len(fitted.record.steps)),
        # Steps of a short run are few: only the first one, which starts with nothing, is left out.
        warmup_steps=0,
        seed=seed,
        filters_groups=group_filter.enable,
        # Without a filter none is judged.
        knows_each_sample=not group_filter.enable
        or all(group.is_decided_by_grades for group in fitted.groups),
        yield_floor=YieldFloor(group_filter.min_yield, group_filter.min_yield_groups),
    )


def _check_filter(config: RunConfig, fitted: FittedRun, file: Path) -> None:
    """A filter that was switched off on the way would keep what the record says was filtered."""
    filtered = [group for group in fitted.groups if group.is_kept is False]
    if filtered and not config.algorithm.filter_groups.enable:
        raise ConfigError(
            f"{file}: algorithm.filter_groups.enable = false, but {GROUPS_NAME} beside it has "
            f"{len(filtered)} groups that were filtered (prompt {filtered[0].prompt_id}: "
            f"{filtered[0].end}); put the configuration there that these were recorded with, or "
            "record a run that has one filter from its start to its end"
        )


def _rules(config: RunConfig, seed: int) -> SamplingRules:
    sampling, num_samples = config.sluice.sampling, config.actor_rollout_ref.rollout.n
    return SamplingRules(
        strategy=StrategyName(sampling.strategy),
        train_batch_size=config.data.train_batch_size,
        max_staleness=config.sluice.asynchrony.max_staleness,
        samples_per_group=num_samples,
        gen_batch_size=config.data.gen_batch_size or config.data.train_batch_size,
        max_num_gen_batches=0,
        probe_samples=max(1, min(sampling.probe_samples, num_samples - 1)),
        exploration=sampling.exploration,
        coverage_guard=sampling.coverage_guard,
        seed=seed,
        paces=config.sluice.asynchrony.pace,
        ahead_share=config.sluice.asynchrony.ahead_share,
        on_policy_fill=on_policy_fill(config),
    )
