"""`sluice report`: write the report and the summary of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run
from sluice.cli.running_run import ask_run, is_active
from sluice.cli.terminal import output_console, print_json, print_line
from sluice.client.run_address import locate_run
from sluice.dashboard.serving import write_report
from sluice.errors import SluiceError
from sluice.report.summary import ended_summary, summarize, write_summary


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
    numbers = {**({} if is_live else ended_summary(folder)), **asdict(summary)}
    write_summary(folder, numbers)
    page = folder / "report.html"
    write_report(folder, page)
    if as_json:
        print_json(numbers)
    else:
        print_line(output_console(), f"{summary.as_text()}\nreport: {page}")


async def _live_accounts(folder: Path) -> Mapping[str, float]:
    """Return the accounting so far of an active run; empty if it does not answer."""
    try:
        return (await ask_run(folder))[1].accounts
    except SluiceError:
        return {}
