"""`sluice config`: check, explain, cover and compare run configurations; nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice.cli.config_check_view import print_report, report_as_json
from sluice.cli.config_keys_view import (
    coverage_as_json,
    description_as_json,
    difference_as_json,
    print_coverage,
    print_description,
    print_differences,
    print_keys,
)
from sluice.cli.plain_table import output_console
from sluice.cli.up import split_arguments
from sluice.config.check_report import check_report
from sluice.config.coverage import coverage
from sluice.config.diff import diff_configs
from sluice.config.explain import all_keys, explain_key, keys_of_section, launch_notices
from sluice.config.key_settings import KeySettings, keys_as_set
from sluice.config.loader import load_config
from sluice.config.memory.shape_reading import find_shape, unknown_shape
from sluice.config.remarks import remarks
from sluice.config.run import RunConfig

YAML_SUFFIXES = (".yaml", ".yml")

config_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Check, explain, cover and compare run configurations.\n\n"
    "\b\nExample:\n  sluice config check run.yaml --device-memory 80",
)

ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE] [KEY=VALUE]...",
        help="A YAML file or a file of overrides, and keys to override in verl's spelling.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@config_commands.command("check")
def check(
    arguments: ConfigArguments = None,
    *,
    model_config: Annotated[
        Path | None, typer.Option(help="config.json of the model, where model.path is not here.")
    ] = None,
    device_memory: Annotated[
        float | None, typer.Option(min=0.1, help="Memory of one device, GiB.")
    ] = None,
    rules: Annotated[
        Literal["all", "here"],
        typer.Option(help="all: what verl would refuse too; here: only what sluice cannot run."),
    ] = "all",
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Whether files that are named must exist.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Apply every rule to a configuration, and print the numbers and the memory it leads to.

    The exit code is 1 if a rule is broken; all of them are listed, each with a value that mends it.

    \b
    Examples:
      sluice config check run.yaml
      sluice config check run.yaml trainer.n_gpus_per_node=16 --device-memory 80
    """
    file, overrides = _parts(arguments or [])
    config = load_config(file, overrides)
    settings = KeySettings(config, keys_as_set(file, overrides))
    notices = [notice.text for notice in launch_notices(file, overrides)] + remarks(config)
    shape = find_shape(config.actor_rollout_ref.model.path, model_config)
    report = check_report(
        config,
        settings,
        shape=shape,
        device_gib=device_memory,
        dataset_rows=count_rows(config),
        files=files,
    )
    shown = [one for one in report.violations if one.here or rules == "all"]
    if as_json:
        found = {**report_as_json(report, shown), "notices": notices}
        typer.echo(json.dumps(found, sort_keys=True))
    else:
        if shape is None:
            notices.append(unknown_shape(config.actor_rollout_ref.model.path))
        print_report(output_console(), report, shown, notices)
    if shown:
        raise typer.Exit(1)


@config_commands.command("explain")
def explain(
    key: Annotated[
        str | None,
        typer.Argument(help="A key or section, in any spelling; none: all keys."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Say what a key means, takes and does here; list the keys of a section, or all of them.

    \b
    Example:
      sluice config explain actor_rollout_ref.actor.clip_ratio_high
      sluice config explain algorithm.rollout_correction
    """
    keys = all_keys() if key is None else keys_of_section(key)
    if key is None or keys:
        if as_json:
            typer.echo(json.dumps([description_as_json(one) for one in keys], sort_keys=True))
        else:
            print_keys(output_console(), keys)
        return
    description = explain_key(key)
    if as_json:
        typer.echo(json.dumps(description_as_json(description), sort_keys=True))
    else:
        print_description(output_console(), description)


@config_commands.command("coverage")
def cover(
    files: Annotated[list[Path], typer.Argument(help="YAML files or files of overrides.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Count what becomes of every key in launch files, and list what is not simply honoured.

    The exit code is 1 if a key is unknown.

    \b
    Example:
      sluice config coverage run.yaml launch.overrides
    """
    found = coverage(files)
    if as_json:
        typer.echo(json.dumps(coverage_as_json(found), sort_keys=True))
    else:
        print_coverage(output_console(), found)
    if found.num_unknown:
        raise typer.Exit(1)


@config_commands.command("diff")
def diff(
    left: Annotated[Path, typer.Argument(help="A YAML file or a file of overrides.")],
    right: Annotated[Path, typer.Argument(help="Another one.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the keys in which two configurations differ, defaults filled in.

    \b
    Example:
      sluice config diff runs/a/config.yaml runs/b/config.yaml
    """
    differences = diff_configs(*(load_config(*_parts([str(file)])) for file in (left, right)))
    if as_json:
        typer.echo(json.dumps([difference_as_json(one) for one in differences], sort_keys=True))
    else:
        print_differences(output_console(), differences, (str(left), str(right)))


def _parts(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The YAML file and the overrides; a file of overrides, by any other name, is one of those."""
    if arguments and arguments[0].startswith("@"):
        return None, arguments
    file, overrides = split_arguments(arguments)
    if file is not None and file.suffix not in YAML_SUFFIXES:
        return None, [f"@{file}", *overrides]
    return file, overrides


def count_rows(config: RunConfig) -> int | None:
    """Rows of data.train_files, or `None` where they cannot be read."""
    import pyarrow.lib
    from pyarrow import parquet

    files = config.data.train_files
    if not files:
        return None
    try:
        names = [files] if isinstance(files, str) else files
        return sum(int(parquet.read_metadata(name).num_rows) for name in names)
    except (OSError, pyarrow.lib.ArrowException):
        return None
