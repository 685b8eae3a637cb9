"""`make observability-test`: rules by promtool, then a real Prometheus over a real run.

The last line printed is one JSON object: `passed`, `phases` (seconds by name), `problems`, and what
was found. Exit code 0: all is as it has to be; or there is no Prometheus and
SLUICE_SKIP_WITHOUT_PROMETHEUS=1 allows that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sluice.telemetry.instruments import INSTRUMENTS
from sluice.telemetry.scrape_target import FOLDER
from tools.compose_test.commands import CommandError, output_of
from tools.compose_test.phases import PhaseError, Phases, say, until
from tools.fuzz.live_run import FuzzedRun, live_run
from tools.observability_test.prometheus_programs import (
    SKIP_VARIABLE,
    NoPrometheusError,
    find_programs,
)
from tools.observability_test.prometheus_server import (
    PrometheusServer,
    hurried_copy,
    prometheus_server,
)

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "deploy" / "observability"
STOPPED = "rollout-1"
PROCESSES = ("reward", "rollout-0", STOPPED, "trainer")
_SETTINGS = (
    *(f"sluice.{kind}.endpoint.metrics_port=0" for kind in ("trainer", "reward", "rollout")),
    "sluice.rollout.replicas=2",
)
_WAIT_S, _LOOK_S, _PROMTOOL_S = 180.0, 0.5, 120.0
# Exported only where there is a reference model or a validation, or where something went wrong.
_NOT_HERE = {
    "sluice_trainer_reference_kl_nats",
    "sluice_trainer_validation_score",
    "sluice_rpc_errors_total",
    "sluice_quota_refusals_total",
}


def main(arguments: Sequence[str]) -> int:
    """Tests; 0: nothing is wrong."""
    _parse(arguments)
    phases, found = Phases(), dict[str, object]()
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sluice-observability-") as scratch:
        try:
            with phases.phase("programs"):
                say(find_programs())
            _check_files(phases)
            asyncio.run(_observe(Path(scratch), phases, found))
        except NoPrometheusError as error:
            if os.environ.get(SKIP_VARIABLE) == "1":
                _print_last({"skipped": str(error), "passed": True, "phases": phases.seconds})
                return 0
            problems.append(str(error))
        except (CommandError, PhaseError) as error:
            problems.append(str(error))
    for problem in problems:
        say(f"FAILED: {problem}")
    report = {"passed": not problems, "phases": phases.seconds, "problems": problems}
    _print_last({**report, **found})
    return 1 if problems else 0


def _parse(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(
        prog="python -m tools.observability_test",
        description="Checks rules and alerts, and has a real Prometheus scrape a real run.",
        epilog="example: SLUICE_INSTALL_PROMETHEUS=1 python -m tools.observability_test",
    ).parse_args(arguments)


def _check_files(phases: Phases) -> None:
    """What promtool says of the shipped files as they are."""
    folder = PROFILE / "prometheus"
    for name, command in (
        ("check config", ("check", "config", "prometheus.yml")),
        ("check rules", ("check", "rules", "rules.yml", "alerts.yml")),
        ("test rules", ("test", "rules", "alerts_test.yml")),
    ):
        with phases.phase(f"promtool {name}"):
            output_of("promtool", *command, timeout_s=_PROMTOOL_S, folder=folder)


async def _observe(scratch: Path, phases: Phases, found: dict[str, object]) -> None:
    async with live_run(scratch / "job", 0, _SETTINGS) as run:
        targets = scratch / "job" / "run" / FOLDER
        with phases.phase("start of the run"):
            await _until("a target of every process", lambda: _have_targets(targets))
        config = hurried_copy(PROFILE / "prometheus", scratch / "prometheus", targets)
        with prometheus_server(config, scratch) as server:
            await _scrape(server, phases, found)
            await _stop_a_replica(run, server, phases, found)


def _have_targets(folder: Path) -> bool:
    return {file.stem for file in folder.glob("*.json")} == set(PROCESSES)


async def _scrape(server: PrometheusServer, phases: Phases, found: dict[str, object]) -> None:
    with phases.phase("scrape"):
        up = f'count(up{{job="sluice-local"}} == 1) == {len(PROCESSES)}'
        await _until("all processes are up", lambda: server.value(up) is not None)
        trained = 'sum(sluice_tokens_total{run="run", fate="trained"})'
        await _until("trained tokens", lambda: (server.value(trained) or 0.0) > 0.0)
        first = server.value(trained) or 0.0
        await _until("more trained tokens", lambda: (server.value(trained) or 0.0) > first)
    with phases.phase("every declared metric"):
        declared = {s for group in INSTRUMENTS.values() for i in group for s in i.series}
        await _until("every declared metric", lambda: declared - _NOT_HERE <= server.names())
    with phases.phase("recording rules"):
        rate = "run:sluice_generated_tokens:rate5m"
        await _until("a recorded rate", lambda: (server.value(rate) or 0.0) > 0.0)
    with phases.phase("dashboards"):
        found["dashboard_queries"] = _ask_dashboards(server)
    found["trained_tokens"] = server.value(trained)
    found["steps"] = server.value("sluice_trainer_steps_total")
    found["wanted_replicas"] = server.value("sluice_rollout_demand_replicas")
    found["series"] = server.value('count({__name__=~"sluice_.*"})')


def _ask_dashboards(server: PrometheusServer) -> int:
    """How many queries there are; one that is refused ends the test."""
    queries = [
        query
        for file in sorted((PROFILE / "grafana" / "dashboards").glob("*.json"))
        for query in expressions(json.loads(file.read_text("utf-8")))
    ]
    for query in queries:
        server.query(query.replace("$run", ".*"))
    return len(queries)


def expressions(dashboard: Any) -> Iterator[str]:  # noqa: ANN401  JSON
    """Every query of a dashboard."""
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


async def _stop_a_replica(
    run: FuzzedRun, server: PrometheusServer, phases: Phases, found: dict[str, object]
) -> None:
    firing = 'ALERTS{alertname="SluiceProcessDown", alertstate="firing"}'
    pid = run.pid(STOPPED)
    if pid is None:
        raise PhaseError(f"{STOPPED} does not run")
    with phases.phase("an alert fires"):
        if server.value(f"count({firing})"):
            raise PhaseError(f"an alert fires before anything is wrong: {server.query(firing)}")
        os.kill(pid, signal.SIGSTOP)
        try:
            await _until("an alert", lambda: server.value(f"count({firing})") is not None)
            found["alert"] = [labels["instance"] for labels, _ in server.query(firing)]
        finally:
            os.kill(pid, signal.SIGCONT)
    if found["alert"] != [STOPPED]:
        raise PhaseError(f"alerts of {found['alert']}, where {STOPPED} stood still")
    with phases.phase("the alert ends"):
        await _until("no alert", lambda: server.value(f"count({firing})") is None)


async def _until(what: str, holds: Callable[[], bool]) -> None:
    """Waits in a thread: the run's supervisor needs the loop."""
    await asyncio.to_thread(until, what, holds, timeout_s=_WAIT_S, interval_s=_LOOK_S)


def _print_last(report: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
