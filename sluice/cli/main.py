"""The `sluice` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from errno import ENOSPC
from functools import partial
from typing import Annotated, NoReturn, TextIO

import typer

from sluice import own_version
from sluice.cli.agents import agent_commands
from sluice.cli.arguments import GroupedCommands
from sluice.cli.config import config_commands
from sluice.cli.data import data_commands
from sluice.cli.doctor import doctor
from sluice.cli.environment import environment_commands
from sluice.cli.merge import merge
from sluice.cli.plan import plan
from sluice.cli.policy.evaluate import EvaluateCommand, evaluate
from sluice.cli.policy.generate import generate
from sluice.cli.policy.score import score
from sluice.cli.policy.serve_openai import serve_openai
from sluice.cli.policy.submit import submit
from sluice.cli.reward import reward_commands
from sluice.cli.run.certificates import certs
from sluice.cli.run.control import resume, scale, stop
from sluice.cli.run.init import init
from sluice.cli.run.prepare import prepare
from sluice.cli.run.quickstart import quickstart
from sluice.cli.run.recipe import recipe_commands
from sluice.cli.run.up import train, up
from sluice.cli.simulate import simulate
from sluice.cli.watch.dashboard import compare, dashboard, open_run, report
from sluice.cli.watch.logs import logs
from sluice.cli.watch.status import runs, status
from sluice.concurrency.process import exit_status
from sluice.errors import DataError
from sluice.report.summary import software_versions

commands = typer.Typer(
    name="sluice",
    cls=GroupedCommands,
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
        versions = software_versions() if verbose else {"sluice": own_version()}
        typer.echo("\n".join(f"{name} {value}" for name, value in versions.items()))
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.BadParameter("name a command; sluice --help lists them")


_CHECK = "Check before the start"
_PURPOSES: dict[str, dict[str, Callable[..., None]]] = {
    "Start": {
        "quickstart": quickstart,
        "init": init,
        "up": up,
        "train": train,
    },
    _CHECK: {"doctor": doctor, "plan": plan, "simulate": simulate},
    "Watch": {
        "runs": runs,
        "status": status,
        "logs": logs,
        "open": open_run,
        "dashboard": dashboard,
        "compare": compare,
        "report": report,
    },
    "Change a run": {"scale": scale, "submit": submit, "resume": resume, "stop": stop},
    "Use the policy": {
        "generate": generate,
        "score": score,
        "eval": evaluate,
        "serve-openai": serve_openai,
        "merge": merge,
    },
    "Deploy": {"prepare": prepare, "certs": certs},
}
_CLASSES = {"eval": EvaluateCommand}
for _purpose, _commands in _PURPOSES.items():
    for _name, _command in _commands.items():
        _register = commands.command(_name, cls=_CLASSES.get(_name), rich_help_panel=_purpose)
        _register(_command)
_GROUPS = {
    "config": (config_commands, _CHECK),
    "data": (data_commands, _CHECK),
    "reward": (reward_commands, _CHECK),
    "env": (environment_commands, _CHECK),
    "recipe": (recipe_commands, "Start"),
    "agents": (agent_commands, "Use the policy"),
}
for _name, (_group, _purpose) in _GROUPS.items():
    commands.add_typer(_group, name=_name, cls=GroupedCommands, rich_help_panel=_purpose)


def app() -> None:
    """Run the command; a SluiceError, and a file that cannot be used, is one message and exit
    code 1.
    """
    try:
        code = exit_status("sluice", commands)
    except OSError as error:
        if error.filename is None and error.errno != ENOSPC:
            raise
        code = exit_status("sluice", partial(_refuse, error))
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


def _refuse(error: OSError) -> NoReturn:
    """Raise DataError that names the file of an OSError and the remedy."""
    if error.filename is None:
        what = "a file or the output cannot be written"
        raise DataError(f"{what}: {error.strerror}; free some space")
    raise DataError(
        f"{error.filename}: {error.strerror}; correct the path, its permissions or "
        "the space on its disk"
    )


if __name__ == "__main__":
    app()
