"""Check rules by promtool, then scrape a real run with a Prometheus; `make observability-test`.

The last line printed is one JSON object: `passed`, `phases` (seconds by name), `problems`, and what
was found. Exit code 0: all is as it has to be; or there is no Prometheus and
SLUICE_SKIP_WITHOUT_PROMETHEUS=1 allows that.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from sluice.telemetry.metric_names import instruments
from sluice.telemetry.metrics import FOLDER
from tools.commands import CommandError, NoProgramError, ensure_programs, output_of
from tools.launched_run import LaunchedRun, settings_file, training_run
from tools.observability_test.prometheus_server import (
    PrometheusServer,
    hurried_copy,
    prometheus_server,
)
from tools.phases import PhaseError, Phases, conclude, conclude_without, say, tool_parser, until

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "deploy" / "observability"
STOPPED = "rollout-1"
PROCESSES = ("reward", "rollout-0", STOPPED, "trainer")
_RUN = "run"
_WAIT_S, _LOOK_S, _PROMTOOL_S = 180.0, 0.5, 120.0
# Counters with labels that the first failure names: until then they have no series.
ONLY_AFTER_A_FAILURE = frozenset({"sluice_rpc_errors_total", "sluice_quota_refusals_total"})
# A run without certificates has none of these.
ONLY_WITH_TLS = frozenset({"sluice_certificate_end_seconds"})
DOWN = "SluiceProcessDown"
_EVER_FIRED = 'max_over_time(ALERTS{alertstate="firing"}[1d])'
_DOWN_FIRES = f'ALERTS{{alertname="{DOWN}", alertstate="firing"}}'
# They fire in a healthy run on a machine that is too slow for it, so they prove nothing here.
_OF_THE_LOAD = frozenset({"SluiceTrainerStarved", "SluiceQueueStarved"})


def main(arguments: Sequence[str]) -> int:
    """Run the test; return 0 if nothing is wrong."""
    tool_parser(__doc__, "python -m tools.observability_test").parse_args(arguments)
    phases, problems = Phases(), list[str]()
    found: dict[str, object] = {"phases": phases.seconds}
    with tempfile.TemporaryDirectory(prefix="sluice-observability-") as scratch:
        try:
            with phases.phase("programs"):
                programs = ("prometheus", "promtool")
                ensure_programs(programs, ("prometheus",), "SLUICE_INSTALL_PROMETHEUS")
                say(output_of("promtool", "--version", timeout_s=20).splitlines()[0])
            _check_files(phases)
            _observe(Path(scratch), phases, found)
        except NoProgramError as error:
            return conclude_without(error, "SLUICE_SKIP_WITHOUT_PROMETHEUS", found)
        except (CommandError, PhaseError) as error:
            problems.append(str(error))
    return conclude(found, problems)


def _check_files(phases: Phases) -> None:
    """Check the shipped files as they are by promtool."""
    folder = PROFILE / "prometheus"
    for name, command in (
        ("check config", ("check", "config", "prometheus.yml")),
        ("check rules", ("check", "rules", "rules.yml", "alerts.yml")),
        ("test rules", ("test", "rules", "alerts_test.yml")),
    ):
        with phases.phase(f"promtool {name}"):
            output_of("promtool", *command, timeout_s=_PROMTOOL_S, folder=folder)


def _observe(scratch: Path, phases: Phases, found: dict[str, object]) -> None:
    settings = [settings_file("observability")]
    with training_run("tiny", settings, folder=scratch / "job") as run:
        targets = run.run_dir / FOLDER
        with phases.phase("start of the run"):
            _until("a target of every process", lambda: _have_targets(targets))
        copy = hurried_copy(PROFILE / "prometheus", scratch / "prometheus", targets)
        with prometheus_server(copy, scratch) as server:
            _scrape(server, phases, found)
            _stop_a_replica(run, server, phases, found)


def _have_targets(folder: Path) -> bool:
    return {file.stem for file in folder.glob("*.json")} == set(PROCESSES)


def _scrape(server: PrometheusServer, phases: Phases, found: dict[str, object]) -> None:
    with phases.phase("scrape"):
        up = f'count(up{{job="sluice-local"}} == 1) == {len(PROCESSES)}'
        _until("all processes are up", lambda: server.value(up) is not None)
        trained = f'sum(sluice_tokens_total{{run="{_RUN}", fate="trained"}})'
        _until("trained tokens", lambda: (server.value(trained) or 0.0) > 0.0)
        first = server.value(trained) or 0.0
        _until("more trained tokens", lambda: (server.value(trained) or 0.0) > first)
    with phases.phase("every declared metric"):
        declared = {s for group in instruments().values() for i in group for s in i.series}
        absent = ONLY_AFTER_A_FAILURE | ONLY_WITH_TLS
        _until_none("metrics", lambda: declared - absent - server.names())
    found["missing_metrics"] = sorted(declared - server.names())
    with phases.phase("recording rules"):
        rate = "run:sluice_generated_tokens:rate5m"
        _until("a recorded rate", lambda: (server.value(rate) or 0.0) > 0.0)
    with phases.phase("dashboards"):
        _query_dashboards(server, found)


def _query_dashboards(server: PrometheusServer, found: dict[str, object]) -> None:
    """Ask every query of every dashboard until each has found something."""
    files = sorted((PROFILE / "grafana" / "dashboards").glob("*.json"))
    panels = [panel for file in files for panel in json.loads(file.read_text("utf-8"))["panels"]]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    empty = [target["expr"].replace("$run", _RUN) for target in targets]

    def unanswered() -> list[str]:
        for query in list(empty):
            if any(not math.isnan(value) for _, value in server.query(query)):
                empty.remove(query)
        return [one for one in empty if not any(name in one for name in ONLY_AFTER_A_FAILURE)]

    _until_none("answers to queries of the dashboards", unanswered)
    found["empty_queries"] = empty


def _stop_a_replica(
    run: LaunchedRun, server: PrometheusServer, phases: Phases, found: dict[str, object]
) -> None:
    down = f"count({_DOWN_FIRES})"
    stopped = asyncio.run(run.processes()).get(STOPPED)
    if stopped is None:
        raise PhaseError(f"{STOPPED} does not run")
    _judge_alerts(server, found, "before anything was wrong")
    with phases.phase("an alert fires"):
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            _until("an alert", lambda: server.value(down) is not None)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
    with phases.phase("the alert ends"):
        _until("no alert", lambda: server.value(down) is None)
    _judge_alerts(server, found, f"where {STOPPED} stood still", (DOWN, STOPPED))


def _judge_alerts(
    server: PrometheusServer,
    found: dict[str, object],
    when: str,
    expected: tuple[str, str] | None = None,
) -> None:
    """Fail on alerts that fired at any time of the run, but for those of the load."""
    wrong, slow = set[str](), set[str]()
    for labels, _ in server.query(_EVER_FIRED):
        name, whose = labels["alertname"], labels.get("instance") or labels.get("run", "")
        if name in _OF_THE_LOAD:
            slow.add(name)
        elif (name, whose) != expected:
            wrong.add(f"{name} {whose}".strip())
    found["alerts_of_the_load"] = sorted(slow)
    if wrong:
        raise PhaseError(f"alerts that fired {when}: {', '.join(sorted(wrong))}")


def _until(what: str, holds: Callable[[], bool]) -> None:
    until(what, holds, timeout_s=_WAIT_S, interval_s=_LOOK_S)


def _until_none(what: str, left: Callable[[], Collection[str]]) -> None:
    """Wait until nothing is left; the error names what is."""
    try:
        _until(what, lambda: not left())
    except PhaseError as error:
        raise PhaseError(f"{error}: {sorted(left())}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
