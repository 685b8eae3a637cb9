"""Show a running run in a terminal: progress, learning, use of tokens and time."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.cli.terminal import print_line
from sluice.client.run_monitor import ReplicaSnapshot, RunMonitor, RunSnapshot
from sluice.config.run import RunConfig
from sluice.dashboard.step_history import StepHistory
from sluice.errors import SluiceError
from sluice.report.progress import (
    TimeLeft,
    duration_text,
    groups_since,
    low_yield_notice,
    starting_line,
    state_line,
    step_line,
)
from sluice.report.run_record import METRICS_NAME
from sluice.report.summary import AccountView, account_views
from sluice.rpc.server import RpcServer
from sluice.safe_text import printable
from sluice.telemetry import metric_names
from sluice.telemetry.logs import parse_line

Detail: TypeAlias = Literal["quiet", "steps", "logs"]

REFRESH_S = 1.0
_SHOWN_KEPT = 1000
LINE_EVERY_S, _LINE_EVERY_S_IN_STEPS = 6.0, 60.0
_MIN_REPORTED_S = 5.0
_PAIRS_A_ROW, _WIDEST = (3, 2, 1), 1000
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_LOUD = (" WARNING ", " ERROR ", " CRITICAL ", "Traceback")
# It ends first, or a kill is over in seconds.
_NOT_ANSWERING = "the process evaluation is ending, or starts again"


def run_accuracies(history: StepHistory) -> list[tuple[int, float]]:
    """Return step and held-out accuracy of each validation so far, by step.

    A file that cannot be read for a moment changes nothing.
    """
    with suppress(OSError):
        while history.read():
            pass
    return history.accuracies()


def run_table(
    snapshot: RunSnapshot, accuracies: list[tuple[int, float]], doing: str = ""
) -> RenderableType:
    """Render a snapshot; `accuracies` are `run_accuracies`, `doing` replaces its phase."""
    parts: list[RenderableType] = [_head(snapshot, doing), _numbers(snapshot, accuracies)]
    if snapshot.replicas:
        parts.append(_fleet(snapshot.replicas))
    views = account_views(snapshot.accounts)
    if views:
        parts.append(_accounts(views))
    parts += [
        Text(f"waiting for {a.peer}: {a.phase} ({a.seconds:.0f} s)", style="yellow")
        for a in snapshot.awaited
        if a.seconds > _MIN_REPORTED_S
    ]
    parts += map(Text, guard_lines(snapshot))
    return Group(*parts)


def guard_lines(snapshot: RunSnapshot) -> list[str]:
    """Return why a guard holds the run, and which rules have no signal, one line each."""
    hold_reason = snapshot.hold_reason
    lines = (
        [f"held by a guard: {hold_reason}; `sluice resume` ends the hold"] if hold_reason else []
    )
    silent = [guard for guard in snapshot.guards if guard.state == "no signal"]
    return lines + [f"no signal for the guard '{guard.rule}': {guard.detail}" for guard in silent]


class _FirstThatFits:
    """The first of several layouts that is no wider than the console, or the last one."""

    def __init__(self, *layouts: Table) -> None:
        self._layouts = layouts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=_WIDEST)
        fits = (
            layout
            for layout in self._layouts
            if console.measure(layout, options=wide).maximum <= options.max_width
        )
        yield next(fits, self._layouts[-1])


def _head(snapshot: RunSnapshot, doing: str) -> RenderableType:
    line = Table.grid(padding=(0, 2))
    version = "none" if snapshot.version is None else str(snapshot.version)
    line.add_row(
        Text(f"step {snapshot.step}/{snapshot.total_steps}", style="bold"),
        ProgressBar(total=max(snapshot.total_steps, 1), completed=snapshot.step, width=20),
        doing or f"{snapshot.phase} ({snapshot.phase_seconds:.0f} s)",
        f"policy version {version}",
    )
    return line


def _numbers(snapshot: RunSnapshot, accuracies: list[tuple[int, float]]) -> RenderableType:
    """Render names and values, three pairs per row in 80 columns, fewer in a narrow terminal."""
    held_out = f"{accuracies[-1][1]:.3f}" if accuracies else "-"
    reward, *other_cells = _metric_cells(snapshot.metrics)
    cells = [reward, ("held-out accuracy", held_out), *other_cells]
    return _FirstThatFits(*(_pairs(cells, pairs_a_row) for pairs_a_row in _PAIRS_A_ROW))


def _pairs(cells: list[tuple[str, str]], pairs_a_row: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    for _ in range(pairs_a_row):
        grid.add_column(style="dim")
        grid.add_column(justify="right")
    for begin in range(0, len(cells), pairs_a_row):
        grid.add_row(*(text for pair in cells[begin : begin + pairs_a_row] for text in pair))
    return grid


def _metric_cells(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return names and values of a step; a dash for a missing value."""

    def number(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    groups = "/".join(
        number(f"train/groups_{kind}", ".0f") for kind in ("kept", "all_right", "all_wrong")
    )
    # Groups that are mixed (kept), all right and all wrong.
    return [
        ("reward", number(metric_names.REWARD, ".2f")),
        ("kept/right/wrong", groups),
        ("generated÷trained", number("train/generated_per_trained_tokens", ".2f")),
        ("staleness", number(metric_names.STALENESS_MAX, ".0f")),
        ("tokens/s", number(metric_names.TOKENS_PER_S, ",.0f")),
        ("trainer idle", number(metric_names.TRAINER_IDLE, ".0%")),
        ("rollout idle", number(metric_names.ROLLOUT_IDLE, ".0%")),
        ("s/step", number(metric_names.STEP_S, ".2f")),
    ]


def _accounts(views: tuple[AccountView, ...]) -> Table:
    """Render the use of tokens and seconds; long lines wrap in their column."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for view in views:
        grid.add_row(view.title, view.total_text, view.parts_text)
    return grid


def _fleet(replicas: tuple[ReplicaSnapshot, ...]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("replica", "state", "version", "busy", "tokens/s", "idle"):
        justify: Literal["left", "right"] = "left" if name in {"replica", "state"} else "right"
        table.add_column(name, justify=justify, overflow="fold")
    for replica in replicas:
        table.add_row(
            Text(printable(replica.name)),
            replica.state,
            str(replica.version),
            f"{replica.slots_busy}/{replica.slots}",
            f"{replica.tokens_per_second:,.0f}",
            f"{replica.idle_share:.0%}",
        )
    return table


class LiveView:
    """The view of one run, until its steps end or the caller cancels.

    `total_steps` are those of the run, once known; `shown` has the newest printed log lines.

    Args:
        console: where to show it.
        config: the run's configuration.
        names: service names, for colours.
        detail: ``logs`` prints every log line, ``quiet`` only warnings and errors; ``steps`` prints
            them and the progress of the run.
    """

    def __init__(
        self, console: Console, config: RunConfig, names: tuple[str, ...], *, detail: Detail
    ) -> None:
        self._console = console
        self._detail = detail
        self._config = config
        run_dir = Path(config.sluice.run_dir)
        self._log_dir = run_dir / "logs"
        self._is_yield_low = False
        self._step_before = -1
        self._prompts_before: Mapping[str, int] = {}
        self._metrics = run_dir / METRICS_NAME
        self._metrics_size = self._metrics.stat().st_size if self._metrics.is_file() else 0
        self._last_step = 0
        self._history = StepHistory(run_dir)
        run_accuracies(self._history)  # of a run that is resumed
        self._shown_accuracy = self._history.newest_accuracy
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        self._width = max(map(len, names), default=0)
        # Ranks of the trainer beside the first one serve nobody.
        self._messages = {name: "" for name in names if not name.startswith("trainer-")}
        self._up: set[str] = set()
        self._began_s = self._printed_s = time.monotonic()
        self._has_stepped = False
        self.total_steps: int | None = None
        self.shown: deque[str] = deque(maxlen=_SHOWN_KEPT)

    def log_line(self, name: str, line: str) -> None:
        """Print a service's line if it is a warning, an error, or all are shown."""
        parsed = parse_line(line)
        if parsed is not None and name in self._messages:
            self._messages[name] = parsed.message
            if parsed.logger == RpcServer.__module__:
                self._up.add(name)
        if self._detail == "logs" or any(word in line for word in _LOUD):
            prefix = Text(f"{name:<{self._width}} | ", style=self._colours.get(name, "white"))
            self._console.print(prefix + Text(printable(line)), soft_wrap=True)
            self._printed_s = time.monotonic()
            self.shown.append(line.strip())

    async def follow(self, monitor: RunMonitor) -> None:
        """Show the run until its steps end, and wait for services that do not answer."""
        self._print(f"starting {len(self._colours)} processes; logs: {self._log_dir}")
        if self._detail == "quiet":
            await self._learn_total_steps(monitor)
            return
        if self._console.is_terminal:
            await self._refresh_table(monitor)
            return
        async with asyncio.TaskGroup() as tasks:
            states = tasks.create_task(self._print_states(monitor), name="progress")
            await self._print_steps(monitor)
            states.cancel()

    def print_missed_steps(self) -> None:
        """Print the steps that ended before the trainer could be asked: a run may be that short."""
        if self.total_steps is None:
            self.total_steps = self._config.trainer.total_training_steps
        if self._detail == "quiet" or self._console.is_terminal or not self._metrics.is_file():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._metrics_size)
            rows = [json.loads(line) for line in file.read().splitlines() if line.endswith(b"}")]
        for row in rows:
            step = int(row.get("step") or 0)
            if metric_names.STEP in row and step > self._last_step:
                metrics = {name: value for name, value in row.items() if value is not None}
                self._print(step_line(step, self.total_steps or step, metrics))
        self._print_new_accuracy()

    async def _learn_total_steps(self, monitor: RunMonitor) -> None:
        while self.total_steps is None:
            await asyncio.sleep(REFRESH_S)
            with suppress(SluiceError):
                self.total_steps = (await monitor.snapshot()).total_steps

    async def _refresh_table(self, monitor: RunMonitor) -> None:
        """Refresh the table; the last one stays, because services end before their supervisor."""
        with Live(Text(""), console=self._console, refresh_per_second=4) as live:
            while True:
                try:
                    snapshot = await monitor.snapshot()
                except SluiceError:
                    if not self._has_stepped:
                        live.update(Text(self._starting_line(), style="dim"))
                else:
                    self._has_stepped |= snapshot.step > 0
                    doing = self._state_line(snapshot)
                    self._check_yield(snapshot)
                    live.update(run_table(snapshot, run_accuracies(self._history), doing))
                await asyncio.sleep(REFRESH_S)

    async def _print_states(self, monitor: RunMonitor) -> None:
        """Print what the run is doing, so that its log is never silent for long."""
        shown_state: tuple[str, str] | None = None
        while True:
            await asyncio.sleep(REFRESH_S)
            self._print_new_accuracy()
            silent_s = time.monotonic() - self._printed_s
            try:
                snapshot = await monitor.snapshot()
            except SluiceError:
                if silent_s >= LINE_EVERY_S:
                    self._print(self._starting_line())
                continue
            self._check_yield(snapshot)
            trains = self._has_stepped and snapshot.step < snapshot.total_steps
            steps_show_it = self._has_stepped and not snapshot.hold_reason
            state = None if steps_show_it else (snapshot.phase, snapshot.hold_reason)
            is_new = state not in (None, shown_state)
            if is_new or silent_s >= (_LINE_EVERY_S_IN_STEPS if trains else LINE_EVERY_S):
                line = self._state_line(snapshot)
                if snapshot.hold_reason:
                    line += f"; {guard_lines(snapshot)[0]}"
                self._print(line)
            shown_state = state

    async def _print_steps(self, monitor: RunMonitor) -> None:
        following, time_left = 1, TimeLeft()
        while True:
            try:
                total = self.total_steps = (await monitor.snapshot()).total_steps
                async for step, metrics in monitor.steps(following):
                    following, self._last_step, self._has_stepped = step + 1, step, True
                    eta = time_left.update(step, total, metrics)
                    self._print(step_line(step, total, metrics, eta))
                    self._print_new_accuracy()
            except SluiceError:
                await asyncio.sleep(REFRESH_S)
            else:
                self._print_new_accuracy()
                return  # the stream ends with the run

    def _starting_line(self) -> str:
        starting = {
            name: printable(message)
            for name, message in self._messages.items()
            if name not in self._up
        }
        return starting_line(len(self._up), starting, time.monotonic() - self._began_s)

    def _state_line(self, snapshot: RunSnapshot) -> str:
        self.total_steps = snapshot.total_steps
        return state_line(
            snapshot,
            batch_size=self._config.data.train_batch_size,
            min_replicas=self._config.sluice.trainer.min_replicas,
        )

    def _print_new_accuracy(self) -> None:
        run_accuracies(self._history)
        newest = self._history.newest_accuracy
        if newest is not None and newest is not self._shown_accuracy:
            step, accuracy = newest
            self._print(f"validation after step {step}: accuracy {accuracy:.3f}")
        self._shown_accuracy = newest

    def _check_yield(self, snapshot: RunSnapshot) -> None:
        """Print a low yield of the last step, or of the one that does not end, once in a row."""
        if not snapshot.prompts:  # the reward service does not answer
            return
        if snapshot.step != self._step_before:
            self._step_before, self._prompts_before = snapshot.step, snapshot.prompts
        kept = snapshot.groups.get("kept", 0)
        present = groups_since(self._prompts_before, snapshot.prompts, kept)
        text = low_yield_notice(present) or low_yield_notice(snapshot.metrics)
        if text and not self._is_yield_low:
            self._print(f"notice: {text}")
        self._is_yield_low = bool(text)

    def _print(self, text: str) -> None:
        print_line(self._console, text)
        self._printed_s = time.monotonic()


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
                text = await self._poll(monitor)
                if time.monotonic() - self._printed_s >= LINE_EVERY_S:
                    self._print(text)
        with Live(Text(""), console=self._console, refresh_per_second=4) as live:
            while True:
                live.update(Text(await self._poll(monitor)))

    async def _poll(self, monitor: RunMonitor) -> str:
        await asyncio.sleep(REFRESH_S)
        try:
            snapshot = await monitor.snapshot()
        except SluiceError:
            return self._starting_line() if self._first is None else _NOT_ANSWERING
        num_done, total = snapshot.validation
        if self._first is None and total:
            self._first = time.monotonic(), num_done
        return evaluation_line(snapshot, self._left_s(num_done, total))

    def _left_s(self, num_done: int, total: int) -> float | None:
        if self._first is None or num_done <= self._first[1]:
            return None
        began_s, before = self._first
        return (time.monotonic() - began_s) / (num_done - before) * (total - num_done)

    def print_missed_steps(self) -> None:
        """Do nothing: the results are printed by who started the evaluation."""


def evaluation_line(snapshot: RunSnapshot, left_s: float | None) -> str:
    """Return how far an evaluation is.

    Args:
        snapshot: its state.
        left_s: seconds that it still needs; ``None``: not known.
    """
    num_done, total = snapshot.validation
    if not total:
        return f"waiting for replicas to read the model ({duration_text(snapshot.phase_seconds)})"
    tokens_per_s = sum(replica.tokens_per_second for replica in snapshot.replicas)
    line = f"evaluated {num_done} of {total} prompts, {len(snapshot.replicas)} replicas"
    line += f", {tokens_per_s:,.0f} tok/s"
    return line if left_s is None else f"{line}, ETA {duration_text(left_s)}"
