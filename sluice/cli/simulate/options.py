"""The options of `sluice simulate`, and the subject that they describe."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice.algorithm.groups import staleness
from sluice.algorithm.sampling import rules as sampling
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.errors import ConfigError
from sluice.simulate.settings import (
    DEFAULT_STEPS,
    FleetSettings,
    SimulationSettings,
    TrainerSettings,
)
from sluice.simulate.strategies import OpenWorkload, of_strategy
from sluice.simulate.workload import DescribedWorkload, MixtureWorkload
from sluice.simulate.workload_file import read_workload

_MS = 1e-3

Mixture = Annotated[
    Literal["early", "mid", "late"] | None,
    typer.Option(help="Workload; none: mid. Not with --workload."),
]
WorkloadFile = Annotated[
    Path | None,
    typer.Option(
        "--workload",
        help="YAML or JSON file with distributions of pass rates and lengths.",
    ),
]
Strategy = Annotated[StrategyName | None, typer.Option(help="Strategy; none: stream.")]
Replicas = Annotated[int | None, typer.Option(min=1, help="Rollout replicas; none: 8.")]
Slots = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences a replica generates at once; none: 128."),
]
StepMs = Annotated[
    float | None,
    typer.Option(min=0, help="Milliseconds of a decoding step without sequences; none: 20."),
]
SequenceMs = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Milliseconds that each running sequence adds to a decoding step; none: 0.1.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=2, help="Batches; the first third warms up. none: 240."),
]
MaxStaleness = Annotated[int | None, typer.Option(min=0, help="S, versions; none: 4. rounds: 0.")]
AheadShare = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=1.0, help="Share of S batches that may be generated ahead; none: 1."
    ),
]
OnPolicyFill = Annotated[
    Literal["exact", "expected"] | None,
    typer.Option(
        help="At S = 0: groups that a batch surely needs, or is expected to. none: expected."
    ),
]
WhenStale = Annotated[Literal["wait", "drop"] | None, typer.Option(help="none: wait.")]
GroupSize = Annotated[int | None, typer.Option(min=2, help="Samples of a group; none: 16.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Groups of a batch; none: 64.")]
GenBatchSize = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="rounds: prompts of a wave; 0 or none: as many as a batch.",
    ),
]
TrainerSeconds = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds to train a batch; none: 60."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Compare = Annotated[bool, typer.Option("--compare", help="All strategies side by side.")]
SweepGrid = Annotated[
    bool, typer.Option("--sweep", help="A grid of replicas and S; recommends the cheapest.")
]


@dataclass(frozen=True, slots=True)
class Model:
    """The options that say what is simulated, by their names; ``None``: not given."""

    mixture: str | None = None
    workload: Path | None = None
    strategy: StrategyName | None = None
    replicas: int | None = None
    slots: int | None = None
    step_ms: float | None = None
    sequence_ms: float | None = None
    max_staleness: int | None = None
    ahead_share: float | None = None
    on_policy_fill: sampling.OnPolicyFill | None = None
    on_stale: staleness.OnStale | None = None
    group_size: int | None = None
    batch_size: int | None = None
    gen_batch_size: int | None = None
    trainer_s: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is simulated.

    Args:
        name: of the workload, for titles.
        settings: the rest.
        open_workload: the same data set at each call.
    """

    name: str
    settings: SimulationSettings
    open_workload: OpenWorkload


def described_subject(model: Model, steps: int | None, seed: int) -> Subject:
    """Return what the options describe.

    Raises:
        ConfigError: options exclude each other, or a workload's file is wrong.
    """
    if model.mixture is not None and model.workload is not None:
        raise ConfigError(
            f"--workload: {model.workload} and --mixture {model.mixture} both name the workload; "
            "leave one out"
        )
    settings = of_model(model, steps, seed)
    if model.workload is not None:
        description = read_workload(model.workload)
        return Subject(str(model.workload), settings, partial(DescribedWorkload, description, seed))
    mixture = model.mixture or "mid"
    return Subject(mixture, settings, partial(MixtureWorkload, mixture, seed))


def of_model(model: Model, steps: int | None, seed: int) -> SimulationSettings:
    """Return the settings; the defaults are those that the options' help names."""
    batch_size, group_size = model.batch_size or 64, model.group_size or 16
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
    settings = SimulationSettings(
        rules,
        fleet=FleetSettings(num_replicas=8, slots=128),
        trainer=TrainerSettings(train_s=60.0),
        num_steps=steps or DEFAULT_STEPS,
        seed=seed,
    )
    return changed(settings, model)


def changed(settings: SimulationSettings, model: Model) -> SimulationSettings:
    """Return the settings with the fleet, the trainer and the rules that were given."""
    times = {"step-ms": model.step_ms, "sequence-ms": model.sequence_ms}
    for name, value in {**times, "trainer-s": model.trainer_s}.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{name}: {value:g} is no time; give a finite number")
    rules = settings.rules
    if model.max_staleness is not None:
        rules = replace(rules, max_staleness=model.max_staleness)
    if model.ahead_share is not None:
        rules = replace(rules, ahead_share=model.ahead_share)
    if model.on_policy_fill is not None:
        rules = replace(rules, on_policy_fill=model.on_policy_fill)
    if model.gen_batch_size is not None:
        rules = replace(rules, gen_batch_size=model.gen_batch_size or rules.train_batch_size)
    settings = replace(
        settings,
        rules=rules,
        fleet=_fleet(settings.fleet, model),
        trainer=_trainer(settings.trainer, model.trainer_s),
        on_stale=model.on_stale or settings.on_stale,
    )
    return of_strategy(settings, model.strategy or rules.strategy)


def _fleet(fleet: FleetSettings, model: Model) -> FleetSettings:
    base_s = fleet.base_step_s if model.step_ms is None else model.step_ms * _MS
    per_sequence_s = fleet.per_sequence_s if model.sequence_ms is None else model.sequence_ms * _MS
    if base_s + per_sequence_s <= 0.0:
        raise ConfigError(
            f"--step-ms: {base_s / _MS:g}, and --sequence-ms: {per_sequence_s / _MS:g}: a decoding "
            "step would take no time; give one of them above 0"
        )
    return replace(
        fleet,
        num_replicas=model.replicas or fleet.num_replicas,
        slots=model.slots or fleet.slots,
        base_step_s=base_s,
        per_sequence_s=per_sequence_s,
    )


def _trainer(trainer: TrainerSettings, train_s: float | None) -> TrainerSettings:
    """Scale the spread with the mean: a faster trainer's steps differ by fewer seconds."""
    if train_s is None:
        return trainer
    factor = train_s / trainer.train_s if trainer.train_s else 1.0
    return replace(trainer, train_s=train_s, spread_s=trainer.spread_s * factor)
