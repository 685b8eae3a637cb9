"""`make ray-test`: a run on a simulated Ray cluster of three nodes, on this machine's CPU.

The last line printed is one JSON object: `passed`, `phases` (seconds by name), `scaled` (replica
counts that served a step, in order), `killed_and_recovered`, `steps`, `exit_code`, `problems`. Exit
code 0: all is as it has to be. Linux, for loopback addresses and /proc; needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from tools.compose_test.commands import CommandError
from tools.compose_test.phases import PhaseError, Phases, say
from tools.ray_test.marked_processes import MarkedProcesses
from tools.ray_test.scenario import Scenario
from tools.ray_test.simulated_cluster import SimulatedCluster

_LAST_LINES = 60


def main(arguments: Sequence[str]) -> int:
    """Runs the test; the exit code."""
    options = _parse(arguments)
    # Sockets of Ray are in its folder, and their paths may not be long.
    folder = Path(tempfile.mkdtemp(prefix="slr-", dir="/tmp"))
    phases, processes = Phases(), MarkedProcesses(uuid.uuid4().hex, folder)
    cluster = SimulatedCluster(folder / "ray", processes)
    scenario = Scenario(cluster, processes, phases, folder, options.patience)
    problems = []
    try:
        asyncio.run(scenario.drive(options.steps))
    except (CommandError, PhaseError) as error:
        problems.append(str(error))
        _show_end(folder / "up.log")
    finally:
        scenario.stop()
        if options.keep:
            say(f"files: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    problems += scenario.outcome.problems(options.steps)
    for problem in problems:
        say(f"FAILED: {problem}")
    sys.stdout.write(json.dumps(_report(scenario, phases, problems)) + "\n")
    return 1 if problems else 0


def _report(scenario: Scenario, phases: Phases, problems: list[str]) -> dict[str, object]:
    found = scenario.outcome
    return {
        "passed": not problems,
        "phases": phases.seconds,
        "scaled": found.scaled,
        "killed_and_recovered": found.recovered,
        "steps": found.steps,
        "exit_code": found.exit_code,
        "nodes": found.nodes,
        "problems": problems,
    }


def _show_end(log: Path) -> None:
    if log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        say("\n".join(lines[-_LAST_LINES:]))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.ray_test",
        description="Trains on a simulated Ray cluster, scales the run and shoots at it.",
        epilog="example: python -m tools.ray_test --steps 300",
    )
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for each wait")
    parser.add_argument("--keep", action="store_true", help="leave the folder of run and cluster")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
