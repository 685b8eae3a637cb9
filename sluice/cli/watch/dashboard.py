"""`sluice dashboard`, `sluice open` and `sluice report`: a run as a page. `sluice compare`:
several runs beside each other on the console.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run
from sluice.cli.running_run import ask_run, is_active
from sluice.cli.terminal import output_console, print_json, print_line, print_table
from sluice.client.run_address import locate_run, refuse_missing
from sluice.concurrency.process import SUPERVISOR_VARIABLE, end_with_supervisor, stop_on_signals
from sluice.dashboard.run_data import NO_POINTS, compare_folders
from sluice.dashboard.serving import URL_NAME, serve_page, write_report
from sluice.errors import DataError, SluiceError
from sluice.report.run_record import METRICS_NAME
from sluice.report.summary import read_summary, summarize, write_summary
from sluice.safe_text import printable

_NICE, _CONNECT_S = 10, 2.0
_MIN_RUNS, _AXIS_POINTS = 2, 400
_BY = {"step": "step {:,}", "tokens": "{:,} tokens", "seconds": "{:,} s"}
_NONE = "-"


def dashboard(
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: the system chooses.")] = 0,
    others: Annotated[
        list[Path] | None,
        typer.Option("--compare", metavar="RUN", help="Show this run beside it; repeatable."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page with its data to a file, and end."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run in the browser: curves, groups, fleet, use of time and tokens, samples, logs.

    Serves a page that needs no other network; it reads the run's folder and asks the services of a
    running run. Ends with Ctrl-C. On other interfaces than loopback it requires a token of
    sluice.security.token_file.

    \b
    Examples:
      sluice dashboard runs/quickstart --port 8080
      sluice dashboard runs/two --compare runs/one
      sluice dashboard runs/quickstart --export report.html
    """
    run = named_run(run, run_option)
    if export is not None:
        write_report(run, export, others or ())
        if as_json:
            print_json({"report": str(export)})
        else:
            typer.echo(f"report: {export}")
        return
    end_with_supervisor()
    if SUPERVISOR_VARIABLE in os.environ:
        os.nice(_NICE)  # started by a trainer, which comes first
    show = _json_address if as_json else _print_address
    asyncio.run(_serve(run, host, port, show, others or ()))


def open_run(
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    as_json: AsJson = False,
) -> None:
    """Open the page of a run in the browser.

    If the run serves its page (sluice.dashboard.port), opens that one; else serves it until Ctrl-C.
    Prints the address, also where no browser can be opened.

    \b
    Example:
      sluice open runs/quickstart
    """
    run = named_run(run, run_option)
    show_address = _json_address if as_json else _print_address

    def show(url: str) -> None:
        show_address(url)
        open_in_browser(url)

    url = _served_address(run)
    if url is not None:
        show(url)
    else:
        asyncio.run(_serve(run, "127.0.0.1", 0, show))


def open_in_browser(address: str) -> None:
    """Open an address or a file, unless this is a session without a screen, as over SSH."""
    has_screen = "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if has_screen or not sys.platform.startswith("linux"):
        typer.launch(address)


def _served_address(run: Path) -> str | None:
    """Return the address of a page that is served for the run; a killed one left its file."""
    try:
        url = (run / URL_NAME).read_text(encoding="utf-8").strip()
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0), _CONNECT_S):
            return url
    except (OSError, ValueError):
        return None


async def _serve(
    run: Path,
    host: str,
    port: int,
    on_address: Callable[[str], None],
    other_runs: Sequence[Path] = (),
) -> None:
    stop = asyncio.Event()
    with stop_on_signals(stop):
        await serve_page(run, host, port, other_runs=other_runs, stop=stop, on_address=on_address)


def _print_address(url: str) -> None:
    typer.echo(f"dashboard: {url}")


def _json_address(url: str) -> None:
    print_json({"url": url})


def report(
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html and summary.json of a run, active or not, and print the summary.

    \b
    Example:
      sluice report runs/quickstart
    """
    folder = locate_run(named_run(run, run_option)).run_dir
    is_live = asyncio.run(is_active(folder))
    accounts = asyncio.run(_live_accounts(folder)) if is_live else {}
    summary = summarize(folder, accounts=accounts)
    numbers = {**({} if is_live else read_summary(folder)), **asdict(summary)}
    text, page = summary.as_text(), folder / "report.html"
    try:
        write_summary(folder, numbers)
        write_report(folder, page)
        text += f"\nreport: {page}"
    finally:  # a folder that only its owner may write still has numbers to show
        if as_json:
            print_json(numbers)
        else:
            print_line(output_console(), text)


async def _live_accounts(folder: Path) -> Mapping[str, float]:
    """Return the accounting so far of an active run; empty if it does not answer."""
    try:
        return (await ask_run(folder))[1].accounts
    except SluiceError:
        return {}


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
    if len(runs) < _MIN_RUNS:
        raise typer.BadParameter("give at least two runs", param_hint="RUN RUN...")
    for run in runs:
        refuse_missing(run)
        if not (run / METRICS_NAME).is_file():
            raise DataError(
                f"run: {run} holds no {METRICS_NAME}; give folders of runs that trained a step"
            )
    comparison = compare_folders(runs, _AXIS_POINTS if as_json else NO_POINTS)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison)


def _print_comparison(comparison: dict[str, Any]) -> None:
    console = output_console()
    names = [printable(run["name"]) for run in comparison["runs"]]

    def table(title: str, first_column: str, rows: list[tuple[str, Sequence[str]]]) -> None:
        if rows:
            cells = [(printable(name), *map(printable, values)) for name, values in rows]
            print_table(console, title, (first_column, *names), cells)

    table(
        "Figures",
        "",
        [
            (row["name"], [_value_text(value, row["kind"]) for value in row["values"]])
            for row in comparison["figures"]
        ],
    )
    for measure in ("accuracy", "reward"):
        title = "Held-out accuracy" if measure == "accuracy" else "Reward"
        table(
            f"{title} at equal steps, tokens and time",
            "after",
            [
                (_BY[row["by"]].format(row["at"]), [_value_text(v, "number") for v in row[measure]])
                for row in comparison["progress"]
                if any(value is not None for value in row[measure])
            ],
        )
    table(
        "Configuration",
        "key",
        [(row["key"], [v or _NONE for v in row["values"]]) for row in comparison["differences"]],
    )
    if not comparison["differences"]:
        console.print("The configurations are the same.")


def _value_text(value: float | None, kind: str) -> str:
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
