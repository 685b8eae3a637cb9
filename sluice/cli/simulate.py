"""`sluice simulate`: what a strategy, a fleet and a bound come to, before they are paid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.algorithm.sampling.rules import StrategyName
from sluice.cli import simulation_options as options
from sluice.cli.plain_table import output_console
from sluice.cli.simulation_subject import Choices, Subject, subject, with_choices
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
from sluice.simulate.comparison import compare
from sluice.simulate.fill_time import simulate_fill_times
from sluice.simulate.plots import plot_comparison, plot_result, plot_sweep
from sluice.simulate.result import simulate as simulate_run
from sluice.simulate.settings import SimulationSettings
from sluice.simulate.sweep import grid_around, sweep
from sluice.simulate.twin import twin


def simulate(  # noqa: PLR0913 - one parameter an option
    *,
    mixture: options.Mixture = None,
    workload: options.WorkloadFile = None,
    strategy: options.Strategy = None,
    replicas: options.Replicas = None,
    slots: options.Slots = None,
    step_ms: options.StepMs = None,
    sequence_ms: options.SequenceMs = None,
    steps: options.Steps = None,
    max_staleness: options.MaxStaleness = None,
    ahead_share: options.AheadShare = None,
    on_policy_fill: options.OnPolicyFill = None,
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
    its simulation; with --compare or --sweep, --replicas and others ask what the run would do then.

    \b
    Examples:
      sluice simulate --compare --mixture early
      sluice simulate --workload workload.yaml --step-ms 12 --sequence-ms 0.05
      sluice simulate --strategy stream --replicas 1024 --slots 64 --batch-size 512 --steps 60
      sluice simulate --sweep --trainer-s 120 --plot plots
      sluice simulate --run runs/quickstart --compare --replicas 4

    \b
    A workload's file (all but pass_rates may be left out; docs/simulator.md has the fields):
      pass_rates: [{alpha: 0.25, beta: 5, weight: 0.6}, {alpha: 6, beta: 0.25, weight: 0.4}]
      lengths: {median_tokens_solved: 1500, median_tokens_unsolved: 3500, max_tokens: 16384}
      num_prompts: 8192
    """
    if compare_all and sweep_grid:
        raise ConfigError("simulate: --compare and --sweep exclude each other; give one of them")
    model = options.Model(
        *(mixture, workload, replicas, slots, step_ms, sequence_ms),
        *(group_size, batch_size, gen_batch_size, trainer_s),
    )
    choices = Choices(strategy, max_staleness, ahead_share, on_policy_fill, on_stale)
    mode = _compare if compare_all else _sweep if sweep_grid else _one if run is None else _twin
    _simulate(mode, model, choices, (run, steps, seed), _Output(plot, as_json))


@dataclass(frozen=True, slots=True)
class _Output:
    """Where figures go."""

    plot: Path | None
    as_json: bool


_Mode = Callable[[Subject, _Output], None]


def _simulate(
    mode: _Mode,
    model: options.Model,
    choices: Choices,
    of_run: tuple[Path | None, int | None, int],
    output: _Output,
) -> None:
    """Refuses what excludes each other before anything is read."""
    if of_run[0] is not None:
        model.refuse_beside_run(asks_what_if=mode in (_compare, _sweep))
    found = subject(model, *of_run)
    mode(replace(found, settings=with_choices(found.settings, choices)), output)


def _compare(found: Subject, output: _Output) -> None:
    settings = found.settings
    with _progress("comparing", 2 * len(StrategyName) * settings.num_steps) as on_step:
        compared = compare(settings, found.open_workload, on_step=on_step)
    if output.as_json:
        typer.echo(json.dumps(comparison_as_json(compared), sort_keys=True))
    else:
        print_comparison(output_console(), f"{found.name}: {_described(settings)}", compared)
    if output.plot is not None:
        _notify(plot_comparison(output.plot, compared))


def _sweep(found: Subject, output: _Output) -> None:
    settings = found.settings
    sizes, bounds = grid_around(settings.fleet.num_replicas, settings.rules.max_staleness)
    if settings.rules.strategy is StrategyName.ROUNDS:
        bounds = (0,)
    with _progress("sweeping", len(sizes) * len(bounds) * settings.num_steps) as on_step:
        points = sweep(settings, found.open_workload, sizes, bounds, on_step=on_step)
    if output.as_json:
        typer.echo(json.dumps(sweep_as_json(points), sort_keys=True))
    else:
        title = f"{found.name}, {settings.rules.strategy}: {_described(settings)}"
        print_sweep(output_console(), title, points)
    if output.plot is not None:
        _notify(plot_sweep(output.plot, points))


def _twin(found: Subject, output: _Output) -> None:
    settings, fitted = found.settings, found.fitted
    assert fitted is not None
    _check_rules_are_the_runs(fitted.settings, settings)
    with _progress("simulating", 2 * settings.num_steps) as on_step:
        both = twin(fitted.run, settings, on_step=on_step)
    if output.as_json:
        typer.echo(json.dumps(twin_as_json(both), sort_keys=True))
    else:
        console = output_console()
        print_result(console, both.result, both.fill)
        print_twin(console, found.name, both)
    if output.plot is not None:
        _notify(plot_result(output.plot, both.result, both.fill))


def _check_rules_are_the_runs(of_run: SimulationSettings, given: SimulationSettings) -> None:
    """The difference that another rule makes is no error of the simulation."""
    for option, value, other in (
        ("--strategy", of_run.rules.strategy, given.rules.strategy),
        ("--max-staleness", of_run.rules.max_staleness, given.rules.max_staleness),
        ("--ahead-share", of_run.rules.ahead_share, given.rules.ahead_share),
        ("--on-policy-fill", of_run.rules.on_policy_fill, given.rules.on_policy_fill),
        ("--on-stale", of_run.on_stale, given.on_stale),
    ):
        if value != other:
            raise ConfigError(
                f"{option}: {other}, but the run had {value}, and a run is set beside its own "
                f"simulation; leave {option} out, or give --compare or --sweep"
            )


def _one(found: Subject, output: _Output) -> None:
    settings = found.settings
    with _progress("simulating", 2 * settings.num_steps) as on_step:
        result = simulate_run(settings, found.open_workload(), on_step=on_step)
        fill = simulate_fill_times(settings, found.open_workload(), on_step)
    if output.as_json:
        typer.echo(json.dumps(result_as_json(result, fill), sort_keys=True))
    else:
        print_result(output_console(), result, fill)
    if output.plot is not None:
        _notify(plot_result(output.plot, result, fill))


def _described(settings: SimulationSettings) -> str:
    rules, fleet = settings.rules, settings.fleet
    ahead = f", {rules.ahead_share:g} of it ahead" if rules.num_ahead is not None else ""
    if rules.preempts:
        ahead = " with as many groups as are expected to fill a batch"
    return (
        f"{rules.train_batch_size} groups of {rules.samples_per_group}, "
        f"S = {rules.max_staleness}{ahead}, "
        f"{fleet.num_replicas} replicas with {fleet.slots} slots, "
        f"{1000 * fleet.base_step_s:.3g} + {1000 * fleet.per_sequence_s:.3g} n ms a decoding step "
        "of n sequences, "
        f"{settings.trainer.train_s:g} s to train, "
        f"{settings.num_steps} steps, the first {settings.num_warmup} left out"
    )


def _notify(files: tuple[Path, ...]) -> None:
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
