"""The commands below `sluice eval`, which is a command itself."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from sluice.cli.help_text import summary
from sluice.cli.policy.evaluate_compare import compare_evaluations
from sluice.cli.policy.evaluate_regrade import regrade

_below = typer.Typer(rich_markup_mode=None, add_completion=False)
_below.command("compare")(compare_evaluations)
_below.command("regrade")(regrade)


class EvaluateCommand(TyperCommand):
    """`sluice eval RUN`, or one of its commands if the first word names one.

    A run in a folder of such a name is ``--run compare``, or ``./compare``.
    """

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - typer's arguments
        super().__init__(*given, **named)
        self.commands = get_command(_below).commands  # type: ignore[attr-defined]

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:  # noqa: ANN401 - private types
        """Return the context of the command that the arguments mean."""
        if args and args[0] in self.commands:
            return self.commands[args[0]].make_context(
                f"{info_name} {args[0]}", args[1:], parent, **extra
            )
        return super().make_context(info_name, args, parent, **extra)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - private types
        """List the commands below."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, summary(command.help or "")) for name, command in self.commands.items()]
            )
        super().format_epilog(ctx, formatter)
