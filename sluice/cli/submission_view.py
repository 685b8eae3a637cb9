"""What became of submitted prompts: a line each on stdout, and a bar and a summary on stderr."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.client.policy_client import PromptEvent


class SubmissionView:
    """Context manager; `show` takes each event. The bar is for terminals only.

    Args:
        total: prompts submitted.
        watch: outcomes count as progress, not receipts.
        console: of the bar and the summary; none: stderr.
    """

    def __init__(self, total: int, *, watch: bool, console: Console | None = None) -> None:
        self._watch, self._console = watch, console or Console(stderr=True)
        self._counts: Counter[str] = Counter()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            redirect_stdout=True,
            transient=True,
        )
        self._task = self._bar.add_task("submitting", total=total)

    @property
    def num_refused(self) -> int:
        """Prompts that were refused."""
        return self._counts["refused"]

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._console.print(self.summary(), soft_wrap=True, markup=False, highlight=False)

    def show(self, event: PromptEvent, line: str) -> None:
        """Prints the event's line and moves the bar."""
        self._counts[event.event] += 1
        typer.echo(line)
        is_done = event.event == "refused" or self._watch == (event.event != "accepted")
        self._bar.update(self._task, description=self.summary(), advance=1 if is_done else 0)

    def summary(self) -> str:
        """``120 accepted, 80 trained, 40 filtered_all_right``."""
        counts = [f"{count} {event}" for event, count in self._counts.items()]
        return ", ".join(counts) or "nothing was answered"
