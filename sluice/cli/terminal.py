"""Print for terminals and pipes: JSON, tables, progress, and untrusted text made safe."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sluice.safe_text import printable

# Columns of a pipe: nothing is wrapped or cut, so that grep and awk find it.
_PIPE_WIDTH = 10_000
_LINE_EVERY_S = 5.0


def output_console() -> Console:
    """Return a console for standard output that wraps lines only on a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def print_line(console: Console, line: str) -> None:
    """Print text unwrapped, without markup and colours; escape what a terminal would obey."""
    console.print(printable(line), soft_wrap=True, markup=False, highlight=False)


class RunConsole(Console):
    """The console of a run, which an output that cannot be written never ends.

    What is printed on a full disk is lost, and all of it once nobody reads a pipe any more.
    """

    def _check_buffer(self) -> None:  # which all output passes, a live view's too
        try:
            super()._check_buffer()
        except OSError:
            # The console would keep it in memory, and write all of it with each later line.
            del self._buffer[:]

    def on_broken_pipe(self) -> None:
        """Print no more, where rich would end the process."""
        self.quiet = True


class ConsoleHandler(logging.Handler):
    """Print log records as plain lines; those above INFO name their level."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        is_loud = record.levelno > logging.INFO
        level = f"{record.levelname.lower()}: " if is_loud else ""
        print_line(self._console, level + record.getMessage())


def progress_bars(console: Console, *, is_transient: bool = False) -> Progress:
    """Return bars with a text, counts and the elapsed time; only a terminal shows them.

    Args:
        console: where to show them.
        is_transient: remove them at the end; meanwhile standard output appears above them.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=is_transient,
    )


@contextmanager
def show_count(
    text: str, total: int | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Show a count on standard error: a bar on a terminal, else a line every few seconds.

    Args:
        text: what is counted.
        total: the last count, if it is known.
        clock: seconds, monotonic.

    Yields:
        A function that adds a number to the count.
    """
    console = Console(stderr=True)
    num_done, next_line_s = 0, clock() + _LINE_EVERY_S
    of_all = "" if total is None else f"/{total}"
    with progress_bars(console, is_transient=True) as bars:
        bar = bars.add_task(text, total=total)

        def advance(number: int) -> None:
            nonlocal num_done, next_line_s
            num_done += number
            bars.advance(bar, number)
            if not console.is_terminal and clock() >= next_line_s:
                next_line_s = clock() + _LINE_EVERY_S
                print_line(console, f"{text}: {num_done}{of_all}")

        yield advance


def print_json(value: object) -> None:
    """Print one value for programs, on one line; numbers that JSON lacks become null."""
    text = json.dumps(value, sort_keys=True)
    typer.echo(json.dumps(json.loads(text, parse_constant=lambda _: None)))


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
) -> None:
    """Print a table under its title.

    Args:
        console: where to print it.
        title: a line above it; may be empty.
        columns: headings.
        rows: texts, one for each column.
        right: headings of columns that are aligned to the right.
    """
    if title:
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
    lines = _render_lines(console, table)
    console.print("\n".join(lines) if lines is not None else table, soft_wrap=True, markup=False)
    console.print()


def _render_lines(console: Console, table: Table) -> list[str] | None:
    """Return lines without trailing blanks for a pipe; ``None`` for a terminal."""
    if console.is_terminal:
        return None
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
