"""Shows how far the quickstart's model and data are: a bar, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.quickstart.prepare import PrepareProgress

_LINE_EVERY_S = 5.0


class PreparationView:
    """Context manager; `show` takes the progress.

    Args:
        console: where to show it.
        clock: seconds, never going back.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._next_line_s = clock()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bars = Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        )
        self._bar = self._bars.add_task("making data and tokenizer", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def show(self, progress: PrepareProgress) -> None:
        """Updates the bar, or prints a line if the last one is a few seconds old."""
        text = _text(progress)
        if progress.stage != "data":
            self._bars.update(
                self._bar, description=text, total=progress.total, completed=progress.done
            )
        last = progress.done == progress.total
        if not self._console.is_terminal and (last or self._clock() >= self._next_line_s):
            self._next_line_s = self._clock() + _LINE_EVERY_S
            self._console.print(f"{text}: {progress.done}/{progress.total}", soft_wrap=True)


def _text(progress: PrepareProgress) -> str:
    match progress.stage:
        case "reused":
            return "model and data are there"
        case "data":
            return "making data and tokenizer"
        case _:
            loss = "" if progress.loss is None else f" (loss {progress.loss:.3f})"
            return f"supervised warm start{loss}"
