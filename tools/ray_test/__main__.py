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
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.commands import CommandError
from tools.phases import PhaseError, Phases, conclude, say, tool_parser
from tools.ray_test.cluster import MarkedProcesses, SimulatedCluster
from tools.ray_test.job import run_job
from tools.ray_test.scenario import Scenario

_FAILURES = (CommandError, PhaseError, subprocess.TimeoutExpired)
_LAST_LINES = 60


def main(arguments: Sequence[str]) -> int:
    """Run the test; return the exit code."""
    options, phases = _parse(arguments), Phases()
    report: dict[str, object] = {"phases": phases.seconds}
    problems: list[str] = []
    # Sockets of Ray are in its folder, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="slr-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        processes = MarkedProcesses(uuid.uuid4().hex, folder)
        cluster = SimulatedCluster(folder / "ray", processes)
        scenario = Scenario(cluster, processes, phases, folder, options.patience)
        with _noted(problems, folder / "up.log"), _stopped(cluster, phases, "stop"):
            asyncio.run(scenario.drive(options.steps))
        scenario.outcome.left = processes.running()
        report |= scenario.outcome.report()
        problems += scenario.outcome.problems(options.steps)
        cluster = SimulatedCluster(folder / "jr", processes)
        with _noted(problems, folder / "job" / "up.log"), _stopped(cluster, phases, "job: stop"):
            found = run_job(cluster, processes, phases, folder / "job", options.patience)
            report["job"], problems_of_job = found
            problems += problems_of_job
        if left := processes.running():
            problems.append(f"job: processes that are left: {left}")
    return conclude(report, problems)


@contextmanager
def _noted(problems: list[str], log: Path) -> Iterator[None]:
    """Note a failure of the block, and show the last lines of the log."""
    try:
        yield
    except _FAILURES as error:
        problems.append(str(error))
        lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
        say("\n".join(lines[-_LAST_LINES:]))


@contextmanager
def _stopped(cluster: SimulatedCluster, phases: Phases, phase: str) -> Iterator[None]:
    """End the cluster after the block."""
    try:
        yield
    finally:
        with phases.phase(phase):
            cluster.stop()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m tools.ray_test --steps 300")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for each wait")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
