"""The list of commands in `sluice --help`: grouped by purpose, no summary cut off."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


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
        width = max(len(name) for listed in rows.values() for name, _ in listed)
        for heading, listed in rows.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in listed])


def summary(help_text: str) -> str:
    """Return the first sentence of a help text, without its full stop."""
    sentence, _, _ = " ".join(help_text.split("\n\n")[0].split()).partition(". ")
    return sentence.rstrip(".")
