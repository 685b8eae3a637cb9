"""`sluice doctor`: whether this machine is fit for a run, before anything is started."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from sluice.cli.doctor_view import has_problem, print_result, results_as_json, verdict
from sluice.cli.plain_table import output_console
from sluice.cli.up import split_arguments
from sluice.doctor.examination import Result, examine
from sluice.doctor.examined import examined_run
from sluice.doctor.registry import CHECKS


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="The run: a YAML file, and keys to override in verl's spelling. "
            "None: only what holds for every run.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine before a run: what is wrong, why it matters, and what to do.

    Looks at versions, devices, networks, the clock, limits and, for a run that is named, at its
    model, data, reward function, memory, disk, ports and certificates. Starts and changes nothing.
    The exit code is 1 if there is a problem; warnings leave it at 0.

    \b
    Examples:
      sluice doctor
      sluice doctor run.yaml
      sluice doctor run.yaml sluice.rollout.replicas=4 --json
    """
    file, overrides = split_arguments(arguments or [])
    examined = examined_run(file, overrides)
    console = output_console()
    results: list[Result] = []
    for result in examine(examined, CHECKS):
        results.append(result)
        if not as_json:
            print_result(console, result)
    if as_json:
        typer.echo(json.dumps(results_as_json(results, has_run=examined.has_run), sort_keys=True))
    else:
        console.print(verdict(results, has_run=examined.has_run), soft_wrap=True)
    if has_problem(results):
        raise typer.Exit(1)
