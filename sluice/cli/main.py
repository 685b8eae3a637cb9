"""The `sluice` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from errno import ENOSPC
from functools import partial
from importlib import import_module
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.main import get_group

from sluice import own_version
from sluice.cli.arguments import GroupedCommands, refuse_dashes
from sluice.concurrency.process import exit_status
from sluice.errors import DataError

_CHECK, _USE = "Check before the start", "Use the policy"
# By purpose: the module below `sluice.cli` and what it calls the function, or the commands of a
# group. To import all takes most of a second: a command imports its own.
_PURPOSES = {
    "Start": {
        "quickstart": "run.quickstart:quickstart",
        "init": "run.init:init",
        "up": "run.up:up",
        "train": "run.up:train",
    },
    _CHECK: {"doctor": "doctor:doctor", "plan": "plan:plan", "simulate": "simulate:simulate"},
    "Watch": {
        "runs": "watch.status:runs",
        "status": "watch.status:status",
        "logs": "watch.logs:logs",
        "open": "watch.dashboard:open_run",
        "dashboard": "watch.dashboard:dashboard",
        "compare": "watch.dashboard:compare",
        "report": "watch.dashboard:report",
    },
    "Change a run": {
        "scale": "run.control:scale",
        "submit": "policy.submit:submit",
        "resume": "run.control:resume",
        "stop": "run.control:stop",
    },
    _USE: {
        "generate": "policy.generate:generate",
        "score": "policy.score:score",
        "eval": "policy.evaluate:evaluate",
        "serve-openai": "policy.serve_openai:serve_openai",
        "merge": "merge:merge",
    },
    "Deploy": {"prepare": "run.prepare:prepare", "certs": "run.certificates:certs"},
}
_GROUPS = {
    "config": ("config:config_commands", _CHECK),
    "data": ("data:data_commands", _CHECK),
    "reward": ("reward:reward_commands", _CHECK),
    "env": ("environment:environment_commands", _CHECK),
    "recipe": ("run.recipe:recipe_commands", "Start"),
    "agents": ("agents:agent_commands", _USE),
}
_PLACES = {
    name: (place, purpose) for purpose, named in _PURPOSES.items() for name, place in named.items()
} | _GROUPS
_CLASSES = {"eval": "policy.evaluate:EvaluateCommand"}


def _import_attribute(place: str) -> Any:  # noqa: ANN401 - a function, or commands
    module, _, name = place.partition(":")
    return getattr(import_module(f"sluice.cli.{module}"), name)


class _Commands(Mapping[str, Any]):
    """The commands by name; to look one up imports it."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - private types
        if name not in self._built:
            self._built[name] = _build_command(name, *_PLACES[name])
        return self._built[name]


def _build_command(name: str, place: str, purpose: str) -> Any:  # noqa: ANN401 - private types
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    if name in _GROUPS:
        group = _import_attribute(place)
        alone.add_typer(group, name=name, cls=GroupedCommands, rich_help_panel=purpose)
    else:
        kind = _import_attribute(_CLASSES[name]) if name in _CLASSES else None
        alone.command(name, cls=kind, rich_help_panel=purpose)(_import_attribute(place))
    return get_group(alone).commands[name]


class _AllCommands(GroupedCommands):
    """Every command; it imports the one that a command line names, and for its help all."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - typer's arguments
        super().__init__(*given, **named)
        self.commands = _Commands()  # type: ignore[assignment]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - private types
        """Refuse keys with dashes, which no option resembles."""
        if not ctx.resilient_parsing:
            refuse_dashes(args)
        return super().parse_args(ctx, args)


commands = typer.Typer(
    name="sluice",
    cls=_AllCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# In the docstrings of commands a backspace (\b) keeps click from re-wrapping the text below.


@commands.callback(invoke_without_command=True)
def _sluice(
    context: typer.Context,
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version; with -v also the commit and packages.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="With --version: the commit and packages.")
    ] = False,
) -> None:
    """Train language models with DAPO as three services: rollout, reward, trainer.

    Example: sluice quickstart
    """
    if show_version:
        from sluice.report.summary import software_versions

        versions = software_versions() if verbose else {"sluice": own_version()}
        typer.echo("\n".join(f"{name} {value}" for name, value in versions.items()))
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.BadParameter("name a command; sluice --help lists them")


def app() -> None:
    """Run the command; a SluiceError, and a file that cannot be used, is one message and exit
    code 1.
    """
    try:
        code = exit_status("sluice", commands)
    except OSError as error:
        if error.filename is None and error.errno != ENOSPC:
            raise
        code = exit_status("sluice", partial(_raise_file_error, error))
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it is closed
            _drop_unwritable(stream)
    sys.exit(code)


def _drop_unwritable(stream: TextIO) -> None:
    """Drop what waits for a full disk or a reader that has left: it must not fail at the exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _raise_file_error(error: OSError) -> NoReturn:
    """Raise DataError that names the file of an OSError and the remedy."""
    if error.filename is None:
        message = "a file or the output cannot be written"
        raise DataError(f"{message}: {error.strerror}; free some space")
    raise DataError(
        f"{error.filename}: {error.strerror}; correct the path, its permissions or "
        "the space on its disk"
    )


if __name__ == "__main__":
    app()
