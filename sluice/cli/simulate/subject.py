"""What `sluice simulate` simulates, from its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sluice.algorithm.groups.staleness import OnStale
from sluice.algorithm.sampling.rules import OnPolicyFill, SamplingRules, StrategyName
from sluice.errors import ConfigError
from sluice.simulate.settings import DEFAULT_STEPS, SimulationSettings, TrainerSettings
from sluice.simulate.strategies import OpenWorkload, of_strategy
from sluice.simulate.workload import DescribedWorkload, mixture_workload, read_workload

_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Given:
    """The options by their names; ``None``: not given."""

    mixture: str | None = None
    workload: Path | None = None
    replicas: int | None = None
    slots: int | None = None
    step_ms: float | None = None
    sequence_ms: float | None = None
    group_size: int | None = None
    batch_size: int | None = None
    gen_batch_size: int | None = None
    trainer_s: float | None = None
    strategy: StrategyName | None = None
    max_staleness: int | None = None
    ahead_share: float | None = None
    on_policy_fill: OnPolicyFill | None = None
    on_stale: OnStale | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a simulation.

    Args:
        name: of the workload, for titles.
        settings: the rest.
        open_workload: the same data set at each call.
    """

    name: str
    settings: SimulationSettings
    open_workload: OpenWorkload


def described_subject(given: Given, steps: int | None, seed: int) -> Subject:
    """Return what the options describe; the defaults are those that the options' help names.

    Raises:
        ConfigError: options exclude each other, or a workload's file is wrong.
    """
    if given.mixture is not None and given.workload is not None:
        raise ConfigError(
            f"--workload: {given.workload} and --mixture {given.mixture} both name the workload; "
            "leave one out"
        )
    batch_size, group_size = given.batch_size or 64, given.group_size or 16
    rules = SamplingRules(
        StrategyName.STREAM,
        train_batch_size=batch_size,
        max_staleness=4,
        samples_per_group=group_size,
        gen_batch_size=batch_size,
        probe_samples=min(4, group_size - 1),
        seed=seed,
        on_policy_fill="expected",
    )
    settings = SimulationSettings(rules, num_steps=steps or DEFAULT_STEPS, seed=seed)
    settings = with_options(settings, given)
    if given.workload is not None:
        description = read_workload(given.workload)
        return Subject(str(given.workload), settings, partial(DescribedWorkload, description, seed))
    mixture = given.mixture or "mid"
    return Subject(mixture, settings, partial(mixture_workload, mixture, seed))


def with_options(settings: SimulationSettings, given: Given) -> SimulationSettings:
    """Return the settings with the rules, the fleet and the trainer that were given."""
    rules = _changes(
        max_staleness=given.max_staleness,
        ahead_share=given.ahead_share,
        on_policy_fill=given.on_policy_fill,
        gen_batch_size=given.gen_batch_size,
    )
    fleet = _changes(
        num_replicas=given.replicas,
        slots=given.slots,
        base_step_s=None if given.step_ms is None else given.step_ms * _MS,
        per_sequence_s=None if given.sequence_ms is None else given.sequence_ms * _MS,
    )
    changed = replace(
        settings,
        rules=replace(settings.rules, **rules),
        fleet=replace(settings.fleet, **fleet),
        trainer=_trainer(settings.trainer, given.trainer_s),
        on_stale=given.on_stale or settings.on_stale,
    )
    return of_strategy(changed, given.strategy or changed.rules.strategy)


def _changes(**values: object) -> Mapping[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _trainer(trainer: TrainerSettings, train_s: float | None) -> TrainerSettings:
    """Scale the spread with the mean: a faster trainer's steps differ by fewer seconds."""
    if train_s is None:
        return trainer
    factor = train_s / trainer.train_s if trainer.train_s else 1.0
    return replace(trainer, train_s=train_s, spread_s=trainer.spread_s * factor)
