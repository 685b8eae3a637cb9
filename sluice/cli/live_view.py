"""Shows a run while it goes on: a table that refreshes, or plain lines without a terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sluice.cli.accuracy_tail import AccuracyTail
from sluice.cli.run_table import run_table, step_line
from sluice.cli.terminal_text import printable
from sluice.client.run_monitor import ReplicaSnapshot, RunMonitor
from sluice.errors import SluiceError
from sluice.report.run_record import METRICS_NAME, AccuracyPoint

_REFRESH_S = 1.0
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_LOUD = (" WARNING ", " ERROR ", " CRITICAL ", "Traceback")


class LiveView:
    """Follows one run until cancelled.

    Args:
        console: where to show it.
        run_dir: the run's folder, for validation numbers.
        names: service names, for colours.
        show_logs: print every log line, not only warnings and errors.
    """

    def __init__(
        self, console: Console, run_dir: Path, names: tuple[str, ...], *, show_logs: bool
    ) -> None:
        self._console, self._show_logs = console, show_logs
        self._log_dir = run_dir / "logs"
        self._accuracy = AccuracyTail(run_dir / METRICS_NAME)
        self._shown_accuracy: AccuracyPoint | None = None
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        self._width = max(map(len, names), default=0)

    def log_line(self, name: str, line: str) -> None:
        """Prints a service's line if it should be seen."""
        if self._show_logs or any(word in line for word in _LOUD):
            prefix = Text(f"{name:<{self._width}} | ", style=self._colours.get(name, "white"))
            self._console.print(prefix + Text(printable(line)), soft_wrap=True)

    async def follow(self, monitor: RunMonitor) -> None:
        """Shows the run until cancelled; a service that does not answer is waited for."""
        self._print(f"starting {len(self._colours)} processes; logs: {self._log_dir}")
        if self._console.is_terminal:
            await self._refresh_table(monitor)
        else:
            await self._print_steps(monitor)

    async def _refresh_table(self, monitor: RunMonitor) -> None:
        """The last table stays: towards the end the services leave before their supervisor."""
        waiting = Text("waiting for the services to start", style="dim")
        with Live(waiting, console=self._console, refresh_per_second=4) as live:
            while True:
                try:
                    snapshot = await monitor.snapshot()
                except SluiceError:
                    await asyncio.sleep(_REFRESH_S)
                    continue
                live.update(run_table(snapshot, self._accuracy.newest()))
                await asyncio.sleep(_REFRESH_S)

    async def _print_steps(self, monitor: RunMonitor) -> None:
        following = 1
        while True:
            try:
                total = (await monitor.snapshot()).total_steps
                async for step, metrics in monitor.steps(following):
                    following = step + 1
                    self._print(step_line(step, total, metrics, await _fleet(monitor)))
                    self._print_new_accuracy()
            except SluiceError:
                await asyncio.sleep(_REFRESH_S)
            else:
                self._print_new_accuracy()
                return  # the run has ended and so has its stream

    def _print_new_accuracy(self) -> None:
        point = self._accuracy.newest()
        if point is not None and point != self._shown_accuracy:
            self._print(f"held-out accuracy after step {point.step}: {point.accuracy:.3f}")
        self._shown_accuracy = point

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


async def _fleet(monitor: RunMonitor) -> tuple[ReplicaSnapshot, ...]:
    """The replicas at the moment; none once the trainer leaves."""
    try:
        return (await monitor.snapshot()).replicas
    except SluiceError:
        return ()
