"""`sluice init`: write the commented configuration of a launch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from sluice.cli.arguments import AsJson, TrustScript, split_arguments
from sluice.cli.terminal import print_json
from sluice.config.catalogue.table import catalogue
from sluice.config.check import launch_notes
from sluice.config.loading.loader import load_config, read_settings
from sluice.config.loading.settings_tree import SettingsTree
from sluice.config.loading.yaml_text import flow_text
from sluice.config.problems import Problem
from sluice.errors import ConfigError

_WIDTH = 99


def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The configuration to write.")
    ] = Path("run.yaml"),
    *,
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            help="A launch script of verl, or a file of its key=value lines, to translate.",
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    trust_script: TrustScript = False,
    as_json: AsJson = False,
) -> None:
    """Write a launch's settings as a commented run.yaml: what each key means, and becomes here.

    \b
    Example:
      sluice init qwen.yaml --from run_qwen2-7b.sh
    """
    if file.exists() and not force:
        raise ConfigError(f"{file}: exists; name another file, or give --force to replace it")
    read_from, overrides = split_arguments([str(source)], trust_script=trust_script)
    tree = read_settings(read_from, overrides)
    notes = launch_notes(load_config(read_from, overrides), tree)
    file.write_text("\n".join(_yaml_lines(tree, notes)) + "\n", encoding="utf-8")
    if as_json:
        print_json({"file": str(file), "settings": tree.by_key()})
        return
    typer.echo(f"wrote {file}")
    name = shlex.quote(str(file))
    typer.echo(f"next: sluice config check {name}\n      sluice up {name}")


def _yaml_lines(tree: SettingsTree, notes: Sequence[Problem]) -> Iterator[str]:
    yield "# A run of sluice. The keys are verl's; `sluice config explain KEY` explains each one."
    yield "# Check it: sluice config check FILE. Start it: sluice up FILE."
    note_texts = {note.key: note.text for note in notes}
    parents: tuple[str, ...] = ()
    for path, value in _ordered_leaves(tree):
        shared = 0
        while shared < min(len(parents), len(path) - 1) and parents[shared] == path[shared]:
            shared += 1
        if shared == 0:
            yield ""
        for depth in range(shared, len(path) - 1):
            yield f"{'  ' * depth}{path[depth]}:"
        parents = path[:-1]
        indent, key = "  " * len(parents), ".".join(path)
        note = note_texts.get(tree.spelling(path)) or note_texts.get(key)
        for line in _comment_lines(key, note):
            yield from wrap(
                line, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
            )
        yield f"{indent}{path[-1]}: {flow_text(value)}"


def _ordered_leaves(tree: SettingsTree) -> list[tuple[tuple[str, ...], object]]:
    """Return the settings in the catalogue's order, so that each section is written once."""
    places = {key: place for place, key in enumerate(catalogue())}
    first_place: dict[tuple[str, ...], int] = {}
    leaves = list(tree.leaves())
    for path, _ in leaves:
        for depth in range(1, len(path) + 1):
            place = places.get(".".join(path), len(places))
            first_place[path[:depth]] = min(place, first_place.get(path[:depth], place))

    def rank(leaf: tuple[tuple[str, ...], object]) -> list[tuple[int, str]]:
        path = leaf[0]
        return [(first_place[path[:depth]], path[depth - 1]) for depth in range(1, len(path) + 1)]

    return sorted(leaves, key=rank)


def _comment_lines(key: str, note: str | None) -> Iterator[str]:
    entry = catalogue().get(key)
    if entry is not None and entry.meaning:
        yield entry.meaning.partition(". ")[0].rstrip(".")
    if note is not None:
        yield note
