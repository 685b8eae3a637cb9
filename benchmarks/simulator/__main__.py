"""Set a run beside its simulation: `python -m benchmarks.simulator RUN`.

With --compare or --sweep the run's fitted workload, fleet and trainer take the place of those of
`sluice simulate`, and options change the fleet. Without RUN it simulates --mixture. --plot DIR
writes pictures. docs/simulator.md has what is fitted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.simulator.fit import FittedSimulation, fitted_simulation
from benchmarks.simulator.plots import plot_comparison, plot_result, plot_sweep
from benchmarks.simulator.twin import Twin, print_twin, twin, twin_as_json
from sluice.cli.arguments import AsJson
from sluice.cli.simulate import options
from sluice.cli.simulate.command import (
    compare_strategies,
    print_result,
    progress,
    simulate_one,
    sweep_fleets,
)
from sluice.cli.simulate.options import Subject, changed, described_subject
from sluice.cli.terminal import output_console
from sluice.errors import ConfigError, SluiceError


def _simulate_twin(found: FittedSimulation, title: str, *, as_json: bool) -> Twin:
    with progress("simulating", 2 * found.settings.num_steps) as on_step:
        both = twin(found.run, found.settings, on_step=on_step)
    if as_json:
        typer.echo(json.dumps(twin_as_json(both), sort_keys=True))
    else:
        console = output_console()
        print_result(console, both.result, both.fill)
        print_twin(console, title, both)
    return both


def _subject_of(
    run: Path, fitted: FittedSimulation, model: options.Model, *, asks_what_if: bool
) -> Subject:
    settings = changed(fitted.settings, model)
    if model.mixture is not None or (settings != fitted.settings and not asks_what_if):
        # Another rule or fleet makes a difference that is no error of the simulation.
        raise ConfigError(
            f"{run}: a run is set beside its own simulation; leave the options out that "
            "change its workload, rules, fleet or trainer, or ask with --compare or --sweep"
        )
    return Subject(str(run), settings, fitted.open_workload)


def main(  # noqa: PLR0913 - one parameter an option
    run: Annotated[Path | None, typer.Argument(help="Folder of a run.")] = None,
    *,
    mixture: options.Mixture = None,
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
    gen_batch_size: options.GenBatchSize = None,
    trainer_s: options.TrainerSeconds = None,
    seed: options.Seed = 0,
    compare_all: options.Compare = False,
    sweep_grid: options.SweepGrid = False,
    plot: Annotated[Path | None, typer.Option(help="Folder to write PNG files to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Set a run beside its simulation; --compare and --sweep ask what it would do otherwise."""
    model = options.Model(
        mixture=mixture,
        strategy=strategy,
        replicas=replicas,
        slots=slots,
        step_ms=step_ms,
        sequence_ms=sequence_ms,
        max_staleness=max_staleness,
        ahead_share=ahead_share,
        on_policy_fill=on_policy_fill,
        on_stale=on_stale,
        gen_batch_size=gen_batch_size,
        trainer_s=trainer_s,
    )
    asks_what_if = compare_all or sweep_grid
    if run is None:
        found = described_subject(model, steps, seed)
    else:
        fitted = fitted_simulation(run, steps, seed)
        found = _subject_of(run, fitted, model, asks_what_if=asks_what_if)
    files: Sequence[Path] = ()
    if compare_all:
        compared = compare_strategies(found, as_json=as_json)
        files = plot_comparison(plot, compared) if plot else ()
    elif sweep_grid:
        points = sweep_fleets(found, as_json=as_json)
        files = plot_sweep(plot, points) if plot else ()
    elif run is None:
        result, fill = simulate_one(found, as_json=as_json)
        files = plot_result(plot, result, fill) if plot else ()
    else:
        both = _simulate_twin(fitted, str(run), as_json=as_json)
        files = plot_result(plot, both.result, both.fill) if plot else ()
    for file in files:
        typer.echo(f"wrote {file}", err=True)


if __name__ == "__main__":
    try:
        typer.run(main)
    except SluiceError as error:
        raise SystemExit(str(error)) from error
