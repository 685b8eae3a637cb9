"""Arguments and options that several commands share: the configuration, the run, the form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML file, and keys to override in verl's spelling.",
        show_default=False,
    ),
]
_FOLDER = "Folder of the run."
RunArgument = Annotated[Path, typer.Argument(help=_FOLDER)]
RunOption = Annotated[Path, typer.Option(help=_FOLDER)]
DEFAULT_RUN = Path("runs/quickstart")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Deadline = Annotated[float | None, typer.Option(help="Seconds for everything; none: no limit.")]


def split_arguments(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """Return the configuration file, if the first argument is one, and the overrides."""
    if not arguments:
        return None, []
    first = Path(arguments[0])
    if first.is_file() or not ("=" in arguments[0] or arguments[0].startswith(("+", "~"))):
        return first, arguments[1:]
    return None, arguments
