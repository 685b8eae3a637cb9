"""Run on simulated Ray clusters, on this machine's CPU; `make ray-test`.

First a run of `sluice up` on three nodes, then one as a job of another cluster. The last line
printed is one JSON object: `passed`, `phases` (seconds by name), `scaled` (replica counts that
served a step, in order), `killed_and_recovered`, `steps`, `exit_code`, `job` (its status and
steps), `problems`. Exit code 0: all is as it has to be. Linux, for loopback addresses and /proc;
needs the extra `ray`, and `ray[default]` for the job.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from tools.commands import CommandError
from tools.phases import PhaseError, Phases, conclude, say
from tools.ray_test.cluster import MarkedProcesses, SimulatedCluster
from tools.ray_test.job import run_job
from tools.ray_test.scenario import Scenario

_FAILURES = (CommandError, PhaseError, subprocess.TimeoutExpired)
_LAST_LINES = 60


def main(arguments: Sequence[str]) -> int:
    """Run the test; return the exit code."""
    options = _parse(arguments)
    # Sockets of Ray are in its folder, and their paths may not be long.
    folder = Path(tempfile.mkdtemp(prefix="slr-", dir="/tmp"))
    phases, processes = Phases(), MarkedProcesses(uuid.uuid4().hex, folder)
    report: dict[str, object] = {"phases": phases.seconds}
    problems: list[str] = []
    try:
        problems += _train(folder, processes, phases, options, report)
        problems += _submit(folder, processes, phases, options.patience, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return conclude(report, problems)


def _train(
    folder: Path,
    processes: MarkedProcesses,
    phases: Phases,
    options: argparse.Namespace,
    report: dict[str, object],
) -> list[str]:
    """Train the run that is scaled and whose processes are killed; return its problems."""
    cluster = SimulatedCluster(folder / "ray", processes)
    scenario = Scenario(cluster, processes, phases, folder, options.patience)
    problems = []
    try:
        asyncio.run(scenario.drive(options.steps))
    except _FAILURES as error:
        problems.append(str(error))
        log = folder / "up.log"
        lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
        say("\n".join(lines[-_LAST_LINES:]))
    finally:
        scenario.stop()
    found = scenario.outcome
    report |= {
        "scaled": found.scaled,
        "killed_and_recovered": found.recovered,
        "steps": found.steps,
        "exit_code": found.exit_code,
        "nodes": found.nodes,
    }
    return problems + found.problems(options.steps)


def _submit(
    folder: Path,
    processes: MarkedProcesses,
    phases: Phases,
    patience_s: float,
    report: dict[str, object],
) -> list[str]:
    """Run the job; return its problems."""
    cluster = SimulatedCluster(folder / "jr", processes)
    try:
        report["job"], problems = run_job(cluster, processes, phases, folder / "job", patience_s)
    except _FAILURES as error:
        problems = [str(error)]
    finally:
        with phases.phase("job: stop"):
            cluster.stop()
    if left := processes.running():
        problems.append(f"job: processes that are left: {left}")
    return problems


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.ray_test",
        description="Trains on a simulated Ray cluster, scales the run and kills its processes.",
        epilog="example: python -m tools.ray_test --steps 300",
    )
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for each wait")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
