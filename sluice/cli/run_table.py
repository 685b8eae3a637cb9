"""One run as a table: where it is, how it learns, where tokens and time go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.client.run_monitor import ReplicaSnapshot, RunSnapshot
from sluice.report.accounts_view import AccountView, account_views
from sluice.report.run_record import AccuracyPoint

_MIN_REPORTED_S = 5.0
_PAIRS_A_ROW = 3


def run_table(snapshot: RunSnapshot, accuracy: AccuracyPoint | None) -> RenderableType:
    """Renders a snapshot; `accuracy` is the last validation's."""
    parts: list[RenderableType] = [_head(snapshot), _numbers(snapshot, accuracy)]
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
    return Group(*parts)


def step_line(
    step: int,
    total: int,
    metrics: Mapping[str, float],
    replicas: tuple[ReplicaSnapshot, ...] = (),
) -> str:
    """One finished step as a plain line.

    Args:
        step: its number, which is also the policy version it made.
        total: steps of the run.
        metrics: of the step.
        replicas: the fleet, if it is known; otherwise only its size is told, from `metrics`.
    """
    cells = "  ".join(f"{name} {value}" for name, value in _cells(metrics))
    return f"step {step}/{total}  {cells}  version {step}  {_fleet_text(metrics, replicas)}"


def _fleet_text(metrics: Mapping[str, float], replicas: tuple[ReplicaSnapshot, ...]) -> str:
    """How many replicas serve which version, such as ``replicas 3 (2 at 7, 1 at 6)``."""
    serving = Counter(replica.version for replica in replicas if replica.state == "serving")
    if not serving:
        count = metrics.get("rollout/replicas")
        return f"replicas {'-' if count is None else format(count, '.0f')}"
    versions = ", ".join(
        f"{count} at {version}" for version, count in sorted(serving.items())[::-1]
    )
    return f"replicas {serving.total()} ({versions})"


def _head(snapshot: RunSnapshot) -> RenderableType:
    line = Table.grid(padding=(0, 2))
    version = "none" if snapshot.version is None else str(snapshot.version)
    line.add_row(
        Text(f"step {snapshot.step}/{snapshot.total_steps}", style="bold"),
        ProgressBar(total=max(snapshot.total_steps, 1), completed=snapshot.step, width=20),
        f"{snapshot.phase} ({snapshot.phase_seconds:.0f} s)",
        f"policy version {version}",
    )
    return line


def _numbers(snapshot: RunSnapshot, accuracy: AccuracyPoint | None) -> Table:
    """Names and values side by side, three pairs a row: 80 columns are enough."""
    held_out = "-" if accuracy is None else f"{accuracy.accuracy:.3f}"
    reward, *others = _cells(snapshot.metrics)
    cells = [reward, ("held-out accuracy", held_out), *others]
    grid = Table.grid(padding=(0, 2))
    for _ in range(_PAIRS_A_ROW):
        grid.add_column(style="dim")
        grid.add_column(justify="right")
    for begin in range(0, len(cells), _PAIRS_A_ROW):
        grid.add_row(*(text for pair in cells[begin : begin + _PAIRS_A_ROW] for text in pair))
    return grid


def _cells(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and values of what is shown of a step; a dash for what it has not."""

    def number(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    groups = "/".join(
        number(f"train/groups_{kind}", ".0f") for kind in ("kept", "all_right", "all_wrong")
    )
    # Groups that are mixed (kept), all right and all wrong.
    return [
        ("reward", number("critic/rewards/mean", ".2f")),
        ("kept/right/wrong", groups),
        ("generated÷trained", number("train/generated_per_trained_tokens", ".2f")),
        ("staleness", number("train/staleness_max", ".0f")),
        ("tokens/s", number("rollout/tokens_per_s", ",.0f")),
        ("trainer idle", number("trainer/idle_share", ".0%")),
        ("rollout idle", number("rollout/idle_share", ".0%")),
        ("s/step", number("timing_s/step", ".2f")),
    ]


def _accounts(views: tuple[AccountView, ...]) -> Table:
    """Where tokens and seconds went since the start; long lines are wrapped in their column."""
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
        table.add_column(name, justify="left" if name in {"replica", "state"} else "right")
    for replica in replicas:
        table.add_row(
            replica.name,
            replica.state,
            str(replica.version),
            f"{replica.slots_busy}/{replica.slots}",
            f"{replica.tokens_per_second:,.0f}",
            f"{replica.idle_share:.0%}",
        )
    return table
