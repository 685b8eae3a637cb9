"""The `sluice` command."""

from __future__ import annotations

import sys

import typer

from sluice.cli.evaluate import evaluate
from sluice.cli.generate import generate
from sluice.cli.quickstart import quickstart
from sluice.cli.status import status
from sluice.cli.submit import submit
from sluice.cli.up import up
from sluice.concurrency.exit_status import exit_status

_commands = typer.Typer(
    name="sluice",
    help="Trains language models with DAPO as three services: rollout, reward, trainer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_PASS_ON = {"allow_extra_args": False, "ignore_unknown_options": False}

_commands.command("quickstart", context_settings=_PASS_ON)(quickstart)
_commands.command("up", context_settings=_PASS_ON)(up)
_commands.command("train", context_settings=_PASS_ON, help="The same as `sluice up`.")(up)
_commands.command("status")(status)
_commands.command("generate")(generate)
_commands.command("submit")(submit)
_commands.command("eval")(evaluate)


def app() -> None:
    """Runs the command; errors of ours become one message and exit code 1."""
    sys.exit(exit_status("sluice", _commands))


if __name__ == "__main__":
    app()
