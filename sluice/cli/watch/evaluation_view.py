"""Show a stand-alone evaluation in a terminal: prompts finished, speed, time left."""

from __future__ import annotations

import asyncio
import time

from rich.live import Live
from rich.text import Text

from sluice.cli.watch.live_view import LINE_EVERY_S, REFRESH_S, LiveView
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.errors import SluiceError
from sluice.report.progress import duration_text

# It ends first, or a kill is over in seconds.
_NOT_ANSWERING = "the process evaluation is ending, or starts again"


class EvaluationView(LiveView):
    """The view of one evaluation, until the caller cancels it."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        self._first: tuple[float, int] | None = None  # time and finished prompts at the first look

    async def follow(self, monitor: RunMonitor) -> None:
        """Show the progress, on a terminal in place, else as a line every few seconds."""
        self._print(f"starting {len(self._colours)} processes; logs: {self._log_dir}")
        if self._detail == "quiet":
            return
        if not self._console.is_terminal:
            while True:
                text = await self._look(monitor)
                if time.monotonic() - self._printed_s >= LINE_EVERY_S:
                    self._print(text)
        with Live(Text(""), console=self._console, refresh_per_second=4) as live:
            while True:
                live.update(Text(await self._look(monitor)))

    async def _look(self, monitor: RunMonitor) -> str:
        await asyncio.sleep(REFRESH_S)
        try:
            snapshot = await monitor.snapshot()
        except SluiceError:
            return self._starting_line() if self._first is None else _NOT_ANSWERING
        done, total = snapshot.validation
        if self._first is None and total:
            self._first = time.monotonic(), done
        return evaluation_line(snapshot, self._left_s(done, total))

    def _left_s(self, done: int, total: int) -> float | None:
        if self._first is None or done <= self._first[1]:
            return None
        began_s, before = self._first
        return (time.monotonic() - began_s) / (done - before) * (total - done)

    def print_rest(self) -> None:
        """Do nothing: the results are printed by who started the evaluation."""


def evaluation_line(snapshot: RunSnapshot, left_s: float | None) -> str:
    """Return how far an evaluation is.

    Args:
        snapshot: its state.
        left_s: seconds that it still needs; ``None``: not known.
    """
    done, total = snapshot.validation
    if not total:
        return f"waiting for replicas to read the model ({duration_text(snapshot.phase_seconds)})"
    tokens_per_s = sum(replica.tokens_per_second for replica in snapshot.replicas)
    line = f"evaluated {done} of {total} prompts, {len(snapshot.replicas)} replicas"
    line += f", {tokens_per_s:,.0f} tok/s"
    return line if left_s is None else f"{line}, ETA {duration_text(left_s)}"
