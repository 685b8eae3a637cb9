"""Run the whole loop under random faults, and check what is left of it; `make chaos`.

The last line printed is one JSON object: `minutes`, `faults` by kind, `prompts_lost`,
`prompts_doubled`, `digest_mismatches`, `late_waits` (all four have to be 0), `recovery_s`,
`final_accuracy` and more. Exit code 0: the zeros are zeros and the run ended with code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from tools.chaos.cable import cable
from tools.chaos.experiment import Plan, run_experiment
from tools.chaos.preparation import SIZES
from tools.chaos.schedule import draw_schedule
from tools.chaos.verdict import json_report, print_tables

_LONGEST_CALM_S, _LONGEST_QUIET_S = 30.0, 45.0


def main(arguments: Sequence[str]) -> int:
    """Run chaos; return 0 if nothing was found."""
    options = _parse(arguments)
    began_s = time.monotonic()
    console = Console(stderr=True)
    plan = _plan(options)
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            scratch = tempfile.TemporaryDirectory(prefix="sluice-chaos-")
            folder = Path(stack.enter_context(scratch))
        folder.mkdir(parents=True, exist_ok=True)
        plugged = stack.enter_context(cable())
        findings = asyncio.run(run_experiment(folder, plan, plugged, console))
    print_tables(findings, console)
    report = json_report(findings, minutes=options.minutes, seed=options.seed)
    report["seconds"] = round(time.monotonic() - began_s, 1)
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if findings.is_clean else 1


def _plan(options: argparse.Namespace) -> Plan:
    """Plan the times: a seventh is calm before the faults, a sixth is quiet after them."""
    seconds = 60 * options.minutes
    calm_s, quiet_s = min(_LONGEST_CALM_S, seconds / 7), min(_LONGEST_QUIET_S, seconds / 6)
    schedule = draw_schedule(
        options.seed,
        seconds - calm_s - quiet_s,
        interval_s=options.interval,
        replicas=Plan.replicas,
    )
    return Plan(SIZES[options.size], options.seed, schedule, calm_s, quiet_s)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos",
        description="Kills, stops, adds, removes and cuts off processes of a run that trains.",
        epilog="example: python -m tools.chaos --minutes 1 --seed 7 --size tiny",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="calm, faults and quiet")
    parser.add_argument("--seed", type=int, default=0, help="of faults, model, data and sampling")
    parser.add_argument("--interval", type=float, default=6.0, help="mean seconds between faults")
    parser.add_argument("--size", choices=sorted(SIZES), default="stretch")
    parser.add_argument("--folder", type=Path, help="an empty one: keep everything written here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
