"""`sluice config`: check, explain, cover and compare run configurations; nothing is started."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml
from rich.console import Console
from rich.text import Text

from sluice.cli.terminal import output_console, print_table, split_arguments
from sluice.config.catalogue.entry import ABSENT, KeyStatus
from sluice.config.check import CheckReport, check_report, remarks
from sluice.config.explain import (
    Coverage,
    Difference,
    KeyDescription,
    all_keys,
    coverage,
    diff_configs,
    explain_key,
    keys_of_section,
    launch_notices,
)
from sluice.config.loading.loader import KeySettings, keys_as_set, load_config
from sluice.config.memory.report import MemoryReport
from sluice.config.memory.rollout import GIB, RolloutMemory
from sluice.config.memory.shape import find_shape, unknown_shape
from sluice.config.memory.training import TrainingMemory
from sluice.config.problems import Violation
from sluice.config.run import RunConfig


def print_keys(console: Console, keys: Sequence[KeyDescription]) -> None:
    """All keys, one a line."""
    print_table(
        console,
        f"{len(keys)} keys",
        ("key", "status", "default", "meaning"),
        ((one.path, str(one.status), shown(one.default), one.meaning) for one in keys),
    )


def print_description(console: Console, key: KeyDescription) -> None:
    """One key with everything known about it; empty lines are left out."""
    facts = [
        ("status", f"{key.status}{f': {key.instead}' if key.instead else ''}"),
        ("meaning", key.meaning),
        ("takes", f"{key.takes}{f', in {key.unit}' if key.unit else ''}"),
        ("default", "any keys may stand below" if key.is_block else shown(key.default)),
        ("verl's default", key.verl_default or ""),
        ("effect", key.effect),
        ("advice", key.advice),
        ("sets", ", ".join(key.targets)),
        ("also spelled", ", ".join(key.spellings)),
    ]
    console.print(Text(key.path, style="bold"), soft_wrap=True)
    if key.asked != key.path:
        console.print(Text(f"  asked for as {key.asked}"), soft_wrap=True)
    for name, value in facts:
        if value:
            console.print(Text(f"  {name}: ", style="dim") + Text(value), soft_wrap=True)


def print_coverage(console: Console, found: Coverage) -> None:
    """What is not simply honoured, key by key and with the reason; then the sums."""
    rest = {
        key: status
        for file in found.files
        for key, status in file.keys.items()
        if status is not KeyStatus.HONOURED
    }
    if rest:
        print_table(
            console,
            "Keys that are not simply honoured",
            ("key", "status", "what happens"),
            ((key, str(status), _happens(key, status)) for key, status in rest.items()),
        )
    for file in found.files:
        for sentence in file.unknown:
            console.print(Text(f"{file.file}: {sentence}", style="red"), soft_wrap=True)
    rows = [
        (str(file.file), *_counts(Counter(file.keys.values())), str(len(file.unknown)))
        for file in found.files
    ]
    totals = ("all, each key once", *_counts(found.counts), str(found.num_unknown))
    columns = (*map(str, KeyStatus), "unknown")
    print_table(
        console, "Keys by what becomes of them", ("file", *columns), [*rows, totals], right=columns
    )


def _counts(found: Mapping[KeyStatus, int]) -> list[str]:
    return [str(found.get(status, 0)) for status in KeyStatus]


def _happens(key: str, status: KeyStatus) -> str:
    """The row's own words; of a key that is honoured otherwise, where it goes or why not."""
    described = explain_key(key)
    if status is KeyStatus.NOT_APPLICABLE and described.status is not status:
        return "this value asks for what happens anyway"
    if described.instead:
        return described.instead
    if status is KeyStatus.MAPPED:
        return f"is read as {described.path}"
    return described.advice or described.meaning


def print_differences(
    console: Console, differences: Sequence[Difference], names: tuple[str, str]
) -> None:
    """Keys with other values; columns are headed by the files."""
    if not differences:
        console.print("No difference.")
        return
    print_table(
        console,
        "1 difference" if len(differences) == 1 else f"{len(differences)} differences",
        ("key", *names, "default"),
        ((one.path, shown(one.left), shown(one.right), shown(one.default)) for one in differences),
    )


def description_as_json(key: KeyDescription) -> dict[str, object]:
    """One key; a default that does not exist is left out."""
    return _without_absent(asdict(key))


def coverage_as_json(found: Coverage) -> dict[str, object]:
    """Statuses by file and key, and the sums."""
    return {
        "files": [
            {
                "file": str(file.file),
                "keys": {key: str(status) for key, status in file.keys.items()},
                "unknown": list(file.unknown),
            }
            for file in found.files
        ],
        "counts": {str(status): count for status, count in found.counts.items()},
        "num_unknown": found.num_unknown,
    }


def difference_as_json(one: Difference) -> dict[str, object]:
    """One difference; a side on which the key is missing is left out."""
    values = {"path": one.path, "left": one.left, "right": one.right, "default": one.default}
    return _without_absent(values)


def shown(value: object) -> str:
    """A value as a YAML file has it, on one line; a dash where there is none."""
    if value is ABSENT:
        return "-"
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _without_absent(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not ABSENT}


_TRAINER_COLUMNS = (
    "trainer",
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "logits",
    "update",
    "logprobs",
    "idle",
    "host",
)
_ENGINE_COLUMNS = (
    "engine",
    "weights",
    "activations",
    "KV of all sequences",
    "KV cache",
    "tokens in cache",
    "longest rows in cache",
)
_DASH = "-"


def print_report(
    console: Console, report: CheckReport, shown: Sequence[Violation], notices: Sequence[str]
) -> None:
    """Prints numbers first and broken rules last, where they stay in sight.

    Args:
        shown: the broken rules to tell.
        notices: sentences about what is set but not simply honoured.
    """
    print_table(
        console,
        "Numbers that follow from the batch sizes",
        ("quantity", "as verl would run it", "here", "formula"),
        (
            (one.name, _whole(one.as_verl), _whole(one.here), one.formula)
            for one in report.quantities
        ),
        right=("as verl would run it", "here"),
    )
    if report.memory is not None:
        _print_memory(console, report.memory)
    if notices:
        _print_list(console, Text("Worth knowing:", style="bold"), notices)
        console.print()
    for heading, here in (
        ("sluice cannot run this", True),
        ("verl would refuse this; sluice runs it", False),
    ):
        lines = [f"[{one.rule}] {one.text}" for one in shown if one.here is here]
        if lines:
            style = "bold red" if here else "bold yellow"
            _print_list(console, Text(f"{heading}:", style=style), lines)
    console.print(Text(_verdict(shown)), soft_wrap=True)


def _print_list(console: Console, heading: Text, lines: Sequence[str]) -> None:
    console.print(heading)
    for line in lines:
        console.print(Text(f"  - {line}"), soft_wrap=True)


def report_as_json(report: CheckReport, shown: Sequence[Violation]) -> dict[str, object]:
    """The report for machines; bytes are bytes, unknown numbers are null."""
    tree = asdict(report)
    tree["violations"] = [asdict(one) for one in shown]
    tree["remedies"] = list(_remedies(shown))
    if report.memory is not None:
        tree["memory"]["training"] = [
            {"layout": name, **asdict(one), "update": one.update}
            for name, one in report.memory.training
        ]
        tree["memory"]["own_training"]["update"] = report.memory.own_training.update
        tree["memory"]["rollout"] = [
            {"layout": name, **asdict(one)} for name, one in report.memory.rollout
        ]
    return tree


def _remedies(shown: Sequence[Violation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for one in shown for text in one.remedy))


def _verdict(shown: Sequence[Violation]) -> str:
    if not shown:
        return "No rule is broken."
    count = "1 rule is broken" if len(shown) == 1 else f"{len(shown)} rules are broken"
    remedies = _remedies(shown)
    return f"{count}. To mend: {' '.join(remedies)}" if remedies else f"{count}."


def _print_memory(console: Console, memory: MemoryReport) -> None:
    size = "" if memory.device_bytes is None else f", devices of {memory.device_bytes / GIB:g} GiB"
    active = ""
    if memory.active_parameters != memory.parameters:
        active = f" ({memory.active_parameters / 1e9:.2f} billion active)"
    parameters = f"{memory.parameters / 1e9:.2f} billion parameters{active}{size}"
    rows = [*memory.training, ("here", memory.own_training)]
    print_table(
        console,
        f"Estimated GiB on each trainer device: {parameters}; {memory.backend} as verl lays it "
        "out; peaks of update and logprobs, idle between updates",
        _TRAINER_COLUMNS,
        (_training_cells(name, one) for name, one in rows),
        right=_TRAINER_COLUMNS[1:],
    )
    print_table(
        console,
        "Estimated GiB on each device of an engine",
        _ENGINE_COLUMNS,
        (_engine_cells(name, one) for name, one in memory.rollout),
        right=_ENGINE_COLUMNS[1:],
    )
    if memory.device_bytes is not None:
        fit = "none" if memory.smallest_tp is None else str(memory.smallest_tp)
        console.print(
            Text(
                "Smallest tensor parallel size of the engine (device memory * "
                f"gpu_memory_utilization * TP > parameters * 2 bytes): {fit}"
            ),
            soft_wrap=True,
        )
        console.print()


def _training_cells(name: str, one: TrainingMemory) -> tuple[str, ...]:
    held = (one.parameters, one.gradients, one.optimizer, one.gathered, one.activations, one.logits)
    return (name, *map(_gib, (*held, one.update, one.log_prob, one.idle, one.host)))


def _engine_cells(name: str, one: RolloutMemory) -> tuple[str, ...]:
    return (
        name,
        _gib(one.weights),
        _gib(one.activations),
        _gib(one.kv_of_all_sequences),
        _DASH if one.kv_cache is None else _gib(one.kv_cache),
        _whole(one.kv_tokens),
        _whole(one.longest_rows),
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _whole(number: int | None) -> str:
    return _DASH if number is None else f"{number:,}"


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
