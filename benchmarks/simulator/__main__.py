"""Set a run beside its simulation: `python -m benchmarks.simulator RUN`.

With --compare the run's fitted workload, fleet and trainer take the place of those of
`sluice simulate`, and options change the fleet. docs/simulator.md has what is fitted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.simulator.fit import fitted_simulation
from benchmarks.simulator.twin import print_twin, twin, twin_as_json
from sluice.algorithm.sampling.rules import StrategyName
from sluice.cli.arguments import AsJson
from sluice.cli.simulate import options
from sluice.cli.simulate.command import compare_strategies, print_result, progress
from sluice.cli.simulate.subject import Given, Subject, with_options
from sluice.cli.terminal import output_console
from sluice.errors import ConfigError, SluiceError


def main(  # noqa: PLR0913 - one parameter an option
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    *,
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
    as_json: AsJson = False,
) -> None:
    """Set a run beside its simulation; --compare asks what it would do otherwise."""
    given = Given(
        *(None, None, replicas, slots, step_ms, sequence_ms),
        *(None, None, gen_batch_size, trainer_s),
        strategy=strategy,
        max_staleness=max_staleness,
        ahead_share=ahead_share,
        on_policy_fill=on_policy_fill,
        on_stale=on_stale,
    )
    fitted = fitted_simulation(run, steps, seed)
    settings = with_options(fitted.settings, given)
    for name in StrategyName if compare_all else (settings.rules.strategy,):
        fitted.check_strategy(name)
    if compare_all:
        subject = Subject(str(run), settings, fitted.open_workload)
        compare_strategies(subject, as_json=as_json)
    elif settings != fitted.settings:
        # Another rule or fleet makes a difference that is no error of the simulation.
        raise ConfigError(
            f"{run}: a run is set beside its own simulation; leave the options out that change its "
            "rules, fleet or trainer, or ask with --compare"
        )
    else:
        with progress("simulating", 2 * settings.num_steps) as on_step:
            both = twin(fitted.run, settings, on_step=on_step)
        if as_json:
            typer.echo(json.dumps(twin_as_json(both), sort_keys=True))
        else:
            print_result(output_console(), both.result, both.fill)
            print_twin(output_console(), str(run), both)


if __name__ == "__main__":
    try:
        typer.run(main)
    except SluiceError as error:
        raise SystemExit(str(error)) from error
