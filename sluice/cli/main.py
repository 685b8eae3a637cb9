"""The `sluice` command."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from sluice.cli.config import config_commands
from sluice.cli.data import data_commands
from sluice.cli.doctor import doctor
from sluice.cli.merge import merge
from sluice.cli.policy.evaluate import evaluate
from sluice.cli.policy.generate import generate
from sluice.cli.policy.score import score
from sluice.cli.policy.serve_openai import serve_openai
from sluice.cli.policy.submit import submit
from sluice.cli.run.certificates import certs
from sluice.cli.run.prepare import prepare
from sluice.cli.run.quickstart import quickstart
from sluice.cli.run.scale import scale
from sluice.cli.run.up import train, up
from sluice.cli.simulate.command import simulate
from sluice.cli.watch.compare import compare
from sluice.cli.watch.dashboard import dashboard
from sluice.cli.watch.status import status
from sluice.concurrency.process import exit_status

commands = typer.Typer(
    name="sluice", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"sluice {version('sluice')}")
        raise typer.Exit


# In the docstrings of commands a backspace (\b) keeps click from re-wrapping the text below.


@commands.callback()
def _sluice(
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Train language models with DAPO as three services: rollout, reward, trainer.

    Example: sluice quickstart
    """


commands.command("quickstart")(quickstart)
commands.command("up")(up)
commands.command("train")(train)
commands.command("doctor")(doctor)
commands.command("status")(status)
commands.command("dashboard")(dashboard)
commands.command("compare")(compare)
commands.command("scale")(scale)
commands.command("prepare")(prepare)
commands.command("generate")(generate)
commands.command("submit")(submit)
commands.command("score")(score)
commands.command("serve-openai")(serve_openai)
commands.command("eval")(evaluate)
commands.command("merge")(merge)
commands.command("certs")(certs)
commands.command("simulate")(simulate)
commands.add_typer(config_commands, name="config")
commands.add_typer(data_commands, name="data")


def app() -> None:
    """Run the command; a SluiceError becomes one message and exit code 1."""
    sys.exit(exit_status("sluice", commands))


if __name__ == "__main__":
    app()
