"""`sluice simulate`: what a strategy, a fleet and a bound come to, before they are paid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.algorithm.staleness import OnStale
from sluice.cli import simulation_options as options
from sluice.cli.fitted_simulation import FittedSimulation, fitted_simulation
from sluice.cli.plain_table import output_console
from sluice.cli.simulation_view import (
    comparison_as_json,
    print_comparison,
    print_result,
    print_sweep,
    print_twin,
    result_as_json,
    sweep_as_json,
    twin_as_json,
)
from sluice.errors import ConfigError
from sluice.simulate.comparison import OpenWorkload, compare, of_strategy
from sluice.simulate.mixtures import MixtureWorkload
from sluice.simulate.plots import plot_comparison, plot_result, plot_sweep
from sluice.simulate.result import simulate as simulate_run
from sluice.simulate.settings import (
    DEFAULT_STEPS,
    FleetSettings,
    SimulationSettings,
    TrainerSettings,
)
from sluice.simulate.sweep import grid_around, sweep
from sluice.simulate.twin import twin


def simulate(  # noqa: PLR0913 - one parameter an option
    *,
    mixture: options.Mixture = None,
    strategy: options.Strategy = None,
    replicas: options.Replicas = None,
    slots: options.Slots = None,
    steps: options.Steps = None,
    max_staleness: options.MaxStaleness = None,
    ahead_share: options.AheadShare = None,
    on_stale: options.WhenStale = None,
    group_size: options.GroupSize = None,
    batch_size: options.BatchSize = None,
    gen_batch_size: options.GenBatchSize = None,
    trainer_s: options.TrainerSeconds = None,
    seed: options.Seed = 0,
    run: options.Run = None,
    compare_all: options.Compare = False,
    sweep_grid: options.SweepGrid = False,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Simulate over-generation, staleness and fleet by the functions that a run is driven by.

    With --run and no other mode it sets the run's step time, idle shares and waste beside those of
    its simulation. What a run's folder says cannot be given together with --run.

    \b
    Examples:
      sluice simulate --compare --mixture early
      sluice simulate --strategy stream --replicas 1024 --slots 64 --batch-size 512 --steps 60
      sluice simulate --sweep --trainer-s 120 --plot plots
      sluice simulate --run runs/quickstart
    """
    if compare_all and sweep_grid:
        raise ConfigError("simulate: --compare and --sweep exclude each other; give one of them")
    model = options.Model(
        mixture, replicas, slots, group_size, batch_size, gen_batch_size, trainer_s
    )
    if run is not None:
        model.refuse_beside_run()
    name: str = (mixture or "mid") if run is None else str(run)
    fitted = None if run is None else fitted_simulation(run, steps, seed)
    if fitted is None:
        settings = _of_model(model, steps, seed)
        open_workload: OpenWorkload = partial(MixtureWorkload, name, seed)
    else:
        settings, open_workload = fitted.settings, fitted.open_workload
    settings = _with_choices(settings, strategy, max_staleness, ahead_share, on_stale)
    console = output_console()
    if compare_all:
        _compare(console, name, settings, open_workload, plot, as_json=as_json)
    elif sweep_grid:
        _sweep(console, name, settings, open_workload, plot, as_json=as_json)
    elif fitted is not None:
        _twin(console, name, fitted, settings, plot, as_json=as_json)
    else:
        _one(console, settings, open_workload, plot, as_json=as_json)


def _of_model(model: options.Model, steps: int | None, seed: int) -> SimulationSettings:
    """Settings without a run; the defaults are those that the options' help names."""
    batch_size, group_size = model.batch_size or 64, model.group_size or 16
    rules = SamplingRules(
        StrategyName.STREAM,
        train_batch_size=batch_size,
        max_staleness=4,
        samples_per_group=group_size,
        gen_batch_size=model.gen_batch_size or batch_size,
        probe_samples=min(4, group_size - 1),
        seed=seed,
    )
    train_s = 60.0 if model.trainer_s is None else model.trainer_s
    return SimulationSettings(
        rules,
        fleet=FleetSettings(model.replicas or 8, model.slots or 128),
        trainer=TrainerSettings(train_s=train_s),
        num_steps=steps or DEFAULT_STEPS,
        seed=seed,
    )


def _with_choices(
    settings: SimulationSettings,
    strategy: StrategyName | None,
    max_staleness: int | None,
    ahead_share: float | None,
    on_stale: OnStale | None,
) -> SimulationSettings:
    """What was given on the command line goes before what was fitted."""
    if max_staleness is not None:
        settings = replace(settings, rules=replace(settings.rules, max_staleness=max_staleness))
    if ahead_share is not None:
        settings = replace(settings, rules=replace(settings.rules, ahead_share=ahead_share))
    if on_stale is not None:
        settings = replace(settings, on_stale=on_stale)
    return of_strategy(settings, strategy or settings.rules.strategy)


def _compare(
    console: Console,
    name: str,
    settings: SimulationSettings,
    open_workload: OpenWorkload,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    with _progress("comparing", 2 * len(StrategyName) * settings.num_steps) as on_step:
        compared = compare(settings, open_workload, on_step=on_step)
    if as_json:
        typer.echo(json.dumps(comparison_as_json(compared), sort_keys=True))
    else:
        print_comparison(console, f"{name}: {_described(settings)}", compared)
    if plot is not None:
        _tell(plot_comparison(plot, compared))


def _sweep(
    console: Console,
    name: str,
    settings: SimulationSettings,
    open_workload: OpenWorkload,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    sizes, bounds = grid_around(settings.fleet.num_replicas, settings.rules.max_staleness)
    if settings.rules.strategy is StrategyName.ROUNDS:
        bounds = (0,)
    with _progress("sweeping", len(sizes) * len(bounds) * settings.num_steps) as on_step:
        found = sweep(settings, open_workload, sizes, bounds, on_step=on_step)
    if as_json:
        typer.echo(json.dumps(sweep_as_json(found), sort_keys=True))
    else:
        print_sweep(console, f"{name}, {settings.rules.strategy}: {_described(settings)}", found)
    if plot is not None:
        _tell(plot_sweep(plot, found))


def _twin(
    console: Console,
    name: str,
    fitted: FittedSimulation,
    settings: SimulationSettings,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    _check_rules_are_the_runs(fitted.settings, settings)
    with _progress("simulating", settings.num_steps) as on_step:
        found = twin(fitted.run, settings, on_step=on_step)
    if as_json:
        typer.echo(json.dumps(twin_as_json(found), sort_keys=True))
    else:
        print_result(console, found.result)
        print_twin(console, name, found)
    if plot is not None:
        _tell(plot_result(plot, found.result))


def _check_rules_are_the_runs(of_run: SimulationSettings, given: SimulationSettings) -> None:
    """The difference that another rule makes is no error of the simulation."""
    for option, value, other in (
        ("--strategy", of_run.rules.strategy, given.rules.strategy),
        ("--max-staleness", of_run.rules.max_staleness, given.rules.max_staleness),
        ("--ahead-share", of_run.rules.ahead_share, given.rules.ahead_share),
        ("--on-stale", of_run.on_stale, given.on_stale),
    ):
        if value != other:
            raise ConfigError(
                f"{option}: {other}, but the run had {value}, and a run is set beside its own "
                f"simulation; leave {option} out, or give --compare or --sweep"
            )


def _one(
    console: Console,
    settings: SimulationSettings,
    open_workload: OpenWorkload,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    with _progress("simulating", settings.num_steps) as on_step:
        result = simulate_run(settings, open_workload(), on_step=on_step)
    if as_json:
        typer.echo(json.dumps(result_as_json(result), sort_keys=True))
    else:
        print_result(console, result)
    if plot is not None:
        _tell(plot_result(plot, result))


def _described(settings: SimulationSettings) -> str:
    rules, fleet = settings.rules, settings.fleet
    ahead = f", {rules.ahead_share:g} of it ahead" if rules.num_ahead is not None else ""
    return (
        f"{rules.train_batch_size} groups of {rules.samples_per_group}, "
        f"S = {rules.max_staleness}{ahead}, "
        f"{fleet.num_replicas} replicas with {fleet.slots} slots, "
        f"{settings.trainer.train_s:g} s to train, "
        f"{settings.num_steps} steps, the first {settings.num_warmup} left out"
    )


def _tell(files: tuple[Path, ...]) -> None:
    for file in files:
        typer.echo(f"wrote {file}", err=True)


@contextmanager
def _progress(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error where that is a terminal; each call is one step."""
    console = Console(stderr=True)
    shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *shown,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bars:
        bar = bars.add_task(task, total=total)
        yield lambda _num_leased: bars.advance(bar)
