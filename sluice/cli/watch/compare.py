"""`sluice compare`: runs beside each other on the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli.arguments import AsJson
from sluice.cli.terminal import output_console, print_json, print_table
from sluice.dashboard.run_data import NO_POINTS, compare_folders
from sluice.errors import DataError
from sluice.report.run_record import METRICS_NAME
from sluice.safe_text import printable

_FEWEST, _AXIS_POINTS = 2, 400
_BY = {"step": "step {:,}", "tokens": "{:,} tokens", "seconds": "{:,} s"}
_NONE = "-"


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of the runs.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Compare runs: figures, progress at equal steps, tokens and time, configuration.

    Reward, entropy and the like are means over each run's last 10 steps. For curves use
    sluice dashboard RUN --compare RUN.

    \b
    Examples:
      sluice compare runs/one runs/two
      sluice compare runs/* --json
    """
    if len(runs) < _FEWEST:
        raise typer.BadParameter("give at least two runs", param_hint="RUN RUN...")
    for run in runs:
        if not (run / METRICS_NAME).is_file():
            raise DataError(
                f"run: {run} holds no {METRICS_NAME}; give folders of runs that trained a step"
            )
    found = compare_folders(runs, _AXIS_POINTS if as_json else NO_POINTS)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    console = output_console()
    names = [printable(run["name"]) for run in found["runs"]]

    def table(title: str, first: str, rows: list[tuple[str, Sequence[str]]]) -> None:
        if rows:
            cells = [(printable(name), *map(printable, values)) for name, values in rows]
            print_table(console, title, (first, *names), cells)

    table(
        "Figures",
        "",
        [
            (row["name"], [_text(value, row["kind"]) for value in row["values"]])
            for row in found["figures"]
        ],
    )
    for measure in ("accuracy", "reward"):
        title = "Held-out accuracy" if measure == "accuracy" else "Reward"
        table(
            f"{title} at equal steps, tokens and time",
            "after",
            [
                (_BY[row["by"]].format(row["at"]), [_text(v, "number") for v in row[measure]])
                for row in found["progress"]
                if any(value is not None for value in row[measure])
            ],
        )
    table(
        "Configuration",
        "key",
        [(row["key"], [v or _NONE for v in row["values"]]) for row in found["differences"]],
    )
    if not found["differences"]:
        console.print("The configurations are the same.")


def _text(value: float | None, kind: str) -> str:
    if value is None:
        return _NONE
    match kind:
        case "count":
            return f"{value:,.0f}"
        case "seconds":
            return f"{value:,.0f} s"
        case "share":
            return f"{100 * value:.1f} %"
    return f"{value:.4g}"
