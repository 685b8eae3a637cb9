"""Print for terminals and pipes: tables, and text of others made safe."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_KEPT = "\n\t"
_UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Format characters that only join or shape letters.
_HARMLESS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}\N{SOFT HYPHEN}"


def printable(text: str) -> str:
    r"""`text` with everything visible that a terminal would obey instead of showing.

    Control characters (escape sequences begin with one) and those that reorder or hide text become
    escapes like ``\x1b``; newlines and tabs stay.
    """
    return "".join(character if _is_safe(character) else _escape(character) for character in text)


def _is_safe(character: str) -> bool:
    if character in _KEPT or character in _HARMLESS:
        return True
    return unicodedata.category(character) not in _UNSAFE_CATEGORIES


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


_PIPE_WIDTH = 10_000
"""Columns of a pipe: nothing is wrapped or cut, so that grep and awk find it."""


def output_console() -> Console:
    """A console for standard output that never wraps what is not shown on a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
) -> None:
    """Prints a table under its title.

    Args:
        columns: headings.
        rows: texts, one for each column.
        right: headings of columns that are aligned to the right.
    """
    console.print(Text(title, style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=not console.is_terminal,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    lines = _rendered(console, table)
    console.print("\n".join(lines) if lines is not None else table, soft_wrap=True, markup=False)
    console.print()


def _rendered(console: Console, table: Table) -> list[str] | None:
    """Lines without trailing blanks for a pipe; nothing on a terminal, which draws the table."""
    if console.is_terminal:
        return None
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
