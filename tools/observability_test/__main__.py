"""Check rules by promtool, then scrape a real run with a Prometheus; `make observability-test`.

The last line printed is one JSON object: `passed`, `phases` (seconds by name), `problems`, and what
was found. Exit code 0: all is as it has to be; or there is no Prometheus and
SLUICE_SKIP_WITHOUT_PROMETHEUS=1 allows that.
"""

from __future__ import annotations

import argparse
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
from sluice.telemetry.metrics_page import FOLDER
from tools.commands import CommandError, NoProgramError, ensure_programs, output_of
from tools.fuzz.live_run import FuzzedRun, live_run
from tools.observability_test.prometheus_server import (
    PrometheusServer,
    hurried_copy,
    prometheus_server,
)
from tools.phases import PhaseError, Phases, say, until

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "deploy" / "observability"
STOPPED = "rollout-1"
PROCESSES = ("reward", "rollout-0", STOPPED, "trainer")
_SETTINGS = (
    *(f"sluice.{kind}.endpoint.metrics_port=0" for kind in ("trainer", "reward", "rollout")),
    "sluice.rollout.replicas=2",
    # Accuracy of a validation and the distance to a reference are on the first dashboard.
    "trainer.val_before_train=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
)
_RUN = "run"
_WAIT_S, _LOOK_S, _PROMTOOL_S = 180.0, 0.5, 120.0
SKIP_VARIABLE = "SLUICE_SKIP_WITHOUT_PROMETHEUS"
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
    _parse(arguments)
    phases, found = Phases(), dict[str, object]()
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sluice-observability-") as scratch:
        try:
            with phases.phase("programs"):
                ensure_programs(
                    ("prometheus", "promtool"), ("prometheus",), "SLUICE_INSTALL_PROMETHEUS"
                )
                say(output_of("promtool", "--version", timeout_s=20).splitlines()[0])
            _check_files(phases)
            asyncio.run(_observe(Path(scratch), phases, found))
        except NoProgramError as error:
            if os.environ.get(SKIP_VARIABLE) == "1":
                _print_last({"skipped": str(error), "passed": True, "phases": phases.seconds})
                return 0
            problems.append(str(error))
        except (CommandError, PhaseError) as error:
            problems.append(str(error))
        except ExceptionGroup as group:  # of the run's tasks
            problems += _reported(group)
    for problem in problems:
        say(f"FAILED: {problem}")
    report = {"passed": not problems, "phases": phases.seconds, "problems": problems}
    _print_last({**report, **found})
    return 1 if problems else 0


def _reported(group: ExceptionGroup) -> list[str]:
    """Return what failed, in words; raise anything else than a failed phase."""
    phases, others = group.split((CommandError, PhaseError))
    if others is not None:
        raise others
    inner = phases.exceptions if phases is not None else ()
    return [
        problem
        for one in inner
        for problem in (_reported(one) if isinstance(one, ExceptionGroup) else [str(one)])
    ]


def _parse(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(
        prog="python -m tools.observability_test",
        description="Checks rules and alerts, and has a real Prometheus scrape a real run.",
        epilog="example: SLUICE_INSTALL_PROMETHEUS=1 python -m tools.observability_test",
    ).parse_args(arguments)


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
        trained = f'sum(sluice_tokens_total{{run="{_RUN}", fate="trained"}})'
        await _until("trained tokens", lambda: (server.value(trained) or 0.0) > 0.0)
        first = server.value(trained) or 0.0
        await _until("more trained tokens", lambda: (server.value(trained) or 0.0) > first)
    with phases.phase("every declared metric"):
        declared = {s for group in instruments().values() for i in group for s in i.series}
        absent = ONLY_AFTER_A_FAILURE | ONLY_WITH_TLS
        await _until_none("metrics", lambda: declared - absent - server.names())
    found["missing_metrics"] = sorted(declared - server.names())
    with phases.phase("recording rules"):
        rate = "run:sluice_generated_tokens:rate5m"
        await _until("a recorded rate", lambda: (server.value(rate) or 0.0) > 0.0)
    with phases.phase("dashboards"):
        await _ask_dashboards(server, found)
    found["trained_tokens"] = server.value(trained)
    found["steps"] = server.value("sluice_trainer_steps_total")
    found["wanted_replicas"] = server.value("sluice_rollout_demand_replicas")
    found["series"] = server.value('count({__name__=~"sluice_.*"})')


async def _ask_dashboards(server: PrometheusServer, found: dict[str, object]) -> None:
    """Ask every query of every dashboard until each has found something."""
    files = sorted((PROFILE / "grafana" / "dashboards").glob("*.json"))
    panels = [panel for file in files for panel in json.loads(file.read_text("utf-8"))["panels"]]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    empty = [target["expr"].replace("$run", _RUN) for target in targets]
    found["dashboard_queries"] = len(empty)

    def unanswered() -> list[str]:
        for query in list(empty):
            if any(not math.isnan(value) for _, value in server.query(query)):
                empty.remove(query)
        return [one for one in empty if not any(name in one for name in ONLY_AFTER_A_FAILURE)]

    await _until_none("answers to queries of the dashboards", unanswered)
    found["empty_queries"] = empty


async def _stop_a_replica(
    run: FuzzedRun, server: PrometheusServer, phases: Phases, found: dict[str, object]
) -> None:
    down = f"count({_DOWN_FIRES})"
    pid = run.pid(STOPPED)
    if pid is None:
        raise PhaseError(f"{STOPPED} does not run")
    _judge_alerts(server, found, "before anything was wrong")
    with phases.phase("an alert fires"):
        os.kill(pid, signal.SIGSTOP)
        try:
            await _until("an alert", lambda: server.value(down) is not None)
            found["alert"] = [labels["instance"] for labels, _ in server.query(_DOWN_FIRES)]
        finally:
            os.kill(pid, signal.SIGCONT)
    with phases.phase("the alert ends"):
        await _until("no alert", lambda: server.value(down) is None)
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


async def _until(what: str, holds: Callable[[], bool]) -> None:
    """Wait in a thread: the run's supervisor needs the loop."""
    await asyncio.to_thread(until, what, holds, timeout_s=_WAIT_S, interval_s=_LOOK_S)


async def _until_none(what: str, left: Callable[[], Collection[str]]) -> None:
    """Wait until nothing is left; the error names what is."""
    missing: Collection[str] = ()

    def none_left() -> bool:
        nonlocal missing
        missing = left()
        return not missing

    try:
        await _until(what, none_left)
    except PhaseError as error:
        raise PhaseError(f"{error}: {sorted(missing)}") from error


def _print_last(report: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
