"""Arguments and options that several commands share: the configuration, the run, the form."""

from __future__ import annotations

import os
import re
import shlex
from glob import escape, glob
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sluice.config.loading.keys import all_names, is_known
from sluice.config.loading.yaml_files import VERLS_ESTIMATOR, VERLS_OWN
from sluice.errors import ConfigError
from sluice.launch.script import (
    RECORDED,
    is_script,
    launch_of,
    printing_programs,
    script_text,
)
from sluice.safe_text import printable
from sluice.service_contract import CONFIG_NAME

RUN_VARIABLE = "SLUICE_RUN"
RUNS = Path("runs")
_ESTIMATOR = "algorithm.adv_estimator"
_AHEAD = re.compile(r"one_step_off|fully_async")  # verl's recipes that generate ahead
_AHEAD_SETTINGS = (
    "algorithm.rollout_correction.bypass_mode=true",
    "sluice.asynchrony.max_staleness=1",
)


def complete_key(incomplete: str) -> list[str]:
    """Return the keys and sections that begin with a text, as a shell offers them."""
    return sorted(name for name in all_names() if name.startswith(incomplete))


def complete_setting(incomplete: str) -> list[str]:
    """Complete `KEY=VALUE`, and files; keep a sign before the key."""
    key = incomplete.lstrip("+~")
    sign = incomplete[: len(incomplete) - len(key)]
    return [*_paths(incomplete), *(f"{sign}{name}=" for name in complete_key(key))]


def complete_run(incomplete: str) -> list[str]:
    """Return the runs and folders that begin with a text."""
    runs = [str(run) for run in started_runs() if str(run).startswith(incomplete)]
    return runs or [path for path in _paths(incomplete) if path.endswith(os.sep)]


TrustScript = Annotated[
    bool,
    typer.Option(
        "--trust-script",
        help="Run a launch script without isolation: what it writes stays. For machines without "
        "namespaces.",
    ),
]


def script_settings(
    script: Path, arguments: list[str], *, trusted: bool
) -> tuple[Path | None, list[str]]:
    """Return the configuration file of a script's launch, if it has one, and its `KEY=VALUE`
    arguments; report on stderr how they were found. What the script exports to its launch is
    exported to the run.

    Args:
        script: a bash script; its programs are recorded, and not run.
        arguments: what it gets as ``"$@"``.
        trusted: whether it runs with the user's rights, without isolation.

    Raises:
        ConfigError, DeadlineError: as `launch_of`.
    """
    printers = printing_programs(script_text(script))
    runs = f" Only {', '.join(printers)} and bash itself run." if printers else ""
    _print_report_line(
        f"{script}: bash runs the script to read its arguments; programs are recorded.{runs}"
    )
    if trusted:
        _print_report_line(
            f"  without isolation: what it writes stays; replaced: {', '.join(RECORDED)}"
        )
    launch = launch_of(script, arguments, isolated=not trusted)
    for line in launch.not_run:
        _print_report_line(f"  not run: {line}")
    for line in launch.cut_off:
        _print_report_line(f"  warning: a comment or a missing \\ ends the launch before: {line}")
    for name in launch.unset:
        _print_report_line(f"  warning: ${name} has no value; set it: {name}=... sluice ...")
    for word in launch.left_out:
        name = word.removeprefix("--config-name=").removesuffix(".yaml")
        is_file = word.startswith("--config-name") and not VERLS_OWN.fullmatch(name)
        advice = "; give what it changes of verl's defaults as key=value" if is_file else ""
        _print_report_line(f"  ignored: {word}{advice}")
    if launch.config is not None:
        _print_report_line(f"  configuration: {launch.config}")
    if launch.exported:
        _print_report_line(f"  exports: {', '.join(sorted(launch.exported))}")
        os.environ.update(launch.exported)
    _print_report_line(f"  launch: {launch.module}, {len(launch.settings)} settings")
    settings = list(launch.settings)
    set_keys = {_key_of(setting) for setting in settings}
    missing = [setting for setting in _AHEAD_SETTINGS if _key_of(setting) not in set_keys]
    if _AHEAD.search(launch.module) and missing:
        _print_report_line(
            "  note: verl's recipe trains on samples of an older policy; for the same here, add "
            f"{' '.join(missing)}"
        )
    if launch.config is None and _ESTIMATOR not in set_keys:
        settings.insert(0, f"{_ESTIMATOR}={VERLS_ESTIMATOR}")  # what follows it wins
        _print_report_line(
            f"  added: {settings[0]}, verl's default; settings beside the script win"
        )
    return launch.config, settings


def _key_of(setting: str) -> str:
    return setting.partition("=")[0].lstrip("+~")


def _print_report_line(line: str) -> None:
    typer.echo(printable(line), err=True)


def _paths(incomplete: str) -> list[str]:
    paths = glob(f"{escape(incomplete)}*")
    return sorted(f"{path}{os.sep}" if Path(path).is_dir() else path for path in paths)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Keys to override in verl's spelling.",
        show_default=False,
    ),
]
ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML file, a launch script or a file of overrides, and keys to override in verl's "
        "spelling.",
        show_default=False,
        autocompletion=complete_setting,
    ),
]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help=f"Folder of the run. Default: ${RUN_VARIABLE}, else the newest in {RUNS}/.",
        show_default=False,
        autocompletion=complete_run,
    ),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN", help="The same as RUN.", autocompletion=complete_run),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Deadline = Annotated[
    float | None, typer.Option(help="Seconds for the whole command; none: no limit.")
]


def started_runs(folder: Path = RUNS) -> list[Path]:
    """Return the runs that were started in a folder, newest first."""
    runs = []
    for config in folder.glob(f"*/{CONFIG_NAME}"):
        try:
            runs.append((config.stat().st_mtime, config.parent))
        except OSError:  # deleted meanwhile
            continue
    return [run for _, run in sorted(runs, reverse=True)]


def named_run(argument: Path | None, option: Path | None = None) -> Path:
    """Return the run that a command means: the named one, ``$SLUICE_RUN``, or the newest.

    A run that was not named is reported on standard error. A configuration means the run that it
    has started.

    Raises:
        ConfigError: two different runs are named, or none is and none was started here.
    """
    if argument is not None and option is not None and argument != option:
        raise ConfigError(f"run: named twice, {argument} and --run {option}; leave one out")
    path = argument or option
    if path is not None:
        if path.suffix not in {".yaml", ".yml"} or not path.is_file():
            return path
        from sluice.client.run_address import run_started_from  # gRPC, which not all need

        return run_started_from(path)
    variable = os.environ.get(RUN_VARIABLE)
    runs = [Path(variable)] if variable else started_runs()
    if not runs:
        raise ConfigError(
            f"run: none named, and none was started in {RUNS.absolute()}; give the folder of a run "
            f"(its sluice.run_dir), or set {RUN_VARIABLE}"
        )
    _print_report_line(f"run: {runs[0]} ({RUN_VARIABLE if variable else 'newest'})")
    return runs[0]


def split_arguments(
    arguments: list[str] | None, *, trust_script: bool = False
) -> tuple[Path | None, list[str]]:
    """Return the configuration file, if the first argument is one, and the overrides.

    A launch script becomes the file and overrides of its launch; see `script_settings`.
    """
    if not arguments:
        return None, []
    path = Path(arguments[0])
    if path.is_file() and is_script(path):
        return script_settings(path, arguments[1:], trusted=trust_script)
    if path.is_file() or not ("=" in arguments[0] or arguments[0].startswith(("+", "~"))):
        return path, arguments[1:]
    return None, arguments


def refuse_dashes(words: list[str]) -> None:
    """Raise BadParameter if a key is written like an option, as other programs take it."""
    for number, word in enumerate(words):
        if word == "--":
            return
        name, equals, value = word.removeprefix("--").partition("=")
        section = name.lstrip("+~").partition(".")[0]
        if word.startswith("--") and section != name and is_known((section,)):
            if not equals:
                following = words[number + 1 : number + 2]
                value = following[0] if following and following[0][:1] != "-" else "VALUE"
            setting = printable(shlex.quote(f"{name}={value}"))
            raise typer.BadParameter(f"{printable(word)} is no option; give {setting}")


class GroupedCommands(TyperGroup):
    """Lists commands under the heading that each was registered with, in that order."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - private types
        """Write one list of commands and their summaries for each heading."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is None or command.hidden:
                continue
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            rows.setdefault(heading, []).append((name, summary(command.help or "")))
        width = max(len(name) for summaries in rows.values() for name, _ in summaries)
        for heading, summaries in rows.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in summaries])


def summary(help_text: str) -> str:
    """Return the first sentence of a help text, without its full stop."""
    sentence, _, _ = " ".join(help_text.split("\n\n")[0].split()).partition(". ")
    return sentence.rstrip(".")
