"""Shows a run while it goes on: a table that refreshes, or plain lines without a terminal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sluice.cli.run_table import run_table, step_line
from sluice.client.run_monitor import RunMonitor
from sluice.errors import SluiceError

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
        self._console, self._run_dir, self._show_logs = console, run_dir, show_logs
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        self._width = max(map(len, names), default=0)

    def log_line(self, name: str, line: str) -> None:
        """Prints a service's line if it should be seen."""
        if self._show_logs or any(word in line for word in _LOUD):
            prefix = Text(f"{name:<{self._width}} | ", style=self._colours.get(name, "white"))
            self._console.print(prefix + Text(line), soft_wrap=True, highlight=False)

    async def follow(self, monitor: RunMonitor) -> None:
        """Shows the run until cancelled; a service that does not answer is waited for."""
        if self._console.is_terminal:
            await self._refresh_table(monitor)
        else:
            await self._print_steps(monitor)

    async def _refresh_table(self, monitor: RunMonitor) -> None:
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            while True:
                try:
                    live.update(run_table(await monitor.snapshot(), self._accuracy()))
                except SluiceError as error:
                    live.update(Text(f"waiting for the services to start ({error})", style="dim"))
                await asyncio.sleep(_REFRESH_S)

    async def _print_steps(self, monitor: RunMonitor) -> None:
        following = 1
        while True:
            try:
                total = (await monitor.snapshot()).total_steps
                async for step, metrics in monitor.steps(following):
                    following = step + 1
                    self._console.print(step_line(step, total, metrics), soft_wrap=True)
            except SluiceError:
                await asyncio.sleep(_REFRESH_S)
            else:
                return  # the run has ended and so has its stream

    def _accuracy(self) -> float | None:
        return last_accuracy(self._run_dir / "metrics.jsonl")


def last_accuracy(metrics_file: Path) -> float | None:
    """The newest validation accuracy in a metrics file: the first `val-core/.../acc/mean@N`."""
    if not metrics_file.is_file():
        return None
    for line in reversed(metrics_file.read_text(encoding="utf-8").splitlines()):
        if '"val-core/' not in line:
            continue
        row = json.loads(line)
        return next((v for k, v in row.items() if "/acc/mean@" in k and v is not None), None)
    return None
