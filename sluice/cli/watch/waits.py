"""Show what a run waits for: the explanation, and the waits of every service."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sluice.client.wait_chain import MIN_REPORTED_S, Explanation
from sluice.client.wait_survey import ServiceWaits
from sluice.concurrency.waits import Waiting

_MOST_ROWS_A_SERVICE = 8


def wait_table(explanation: Explanation) -> RenderableType:
    """Render the cause, then one row per wait, the root's first."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("service", "waits for", "phase"):
        table.add_column(name, overflow="fold")
    table.add_column("since", justify="right", no_wrap=True)
    for service in explanation.services:
        for row in _rows(service):
            table.add_row(*(Text(cell) for cell in row))
    return Group(Text(explanation.cause, style="bold"), table)


def _rows(service: ServiceWaits) -> Iterator[tuple[str, str, str, str]]:
    if service.failure:
        process = f"; process {service.pid} is {service.process}" if service.process else ""
        unheard = "" if service.unheard_s is None else f"{service.unheard_s:.0f} s"
        yield service.name, "-", f"{service.failure}{process}", unheard
        return
    if service.still_s is not None and service.still_s >= MIN_REPORTED_S:
        yield service.name, "-", "no progress although it has work", f"{service.still_s:.0f} s"
    reported = [wait for wait in service.waits if wait.seconds >= MIN_REPORTED_S]
    for wait in reported[:_MOST_ROWS_A_SERVICE]:
        yield service.name, wait.peer, _phase(wait), f"{wait.seconds:.0f} s"
    left_out = len(reported) - _MOST_ROWS_A_SERVICE
    if left_out > 0:
        yield service.name, "...", f"{left_out} more; all of them with --json", ""
    if not reported:
        yield service.name, "-", "no service for longer than a second", ""


def _phase(wait: Waiting) -> str:
    return f"{wait.phase} ({wait.count} times)" if wait.count > 1 else wait.phase
