"""What the benchmark of telemetry makes of its measurements, and how it measures CPU."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.bench_telemetry import BOTH, KINDS, OFF, StepCost, report, shares
from benchmarks.metrics_scraper import TelemetryAccount, telemetry_account
from benchmarks.process_cpu import cpu_seconds
from sluice.config.loader import load_config
from sluice.config.service import EndpointConfig
from sluice.rpc.process_readings import ProcessName
from sluice.rpc.served_metrics import served_metrics
from sluice.telemetry.instrument import Reading
from sluice.telemetry.own_cost import SPANS, TELEMETRY_CPU, Part, SpanFate

SPUN_S, SHORT_S = 0.3, 0.05
NAMES = frozenset({"trainer", "reward"})
SPIN = f"import time\nwhile time.process_time() < {SPUN_S}: pass"
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {SPIN!r}])
sys.stdin.read()
"""


def test_overheads_are_medians_of_rounds_each_against_its_own_run_without() -> None:
    found = report(
        {
            OFF: [StepCost(1.0, 2.0), StepCost(2.0, 2.0), StepCost(1.0, 2.0)],
            "traces": [StepCost(1.1, 2.0), StepCost(2.02, 2.0), StepCost(1.5, 1.0)],
        }
    )
    assert found["overhead_traces"] == 0.1
    assert found["overhead_traces_wall"] == 0.0
    assert found["overhead_traces_rounds"] == [0.1, 0.01, 0.5]
    assert found["cpu_s"] == {"off": 1.0, "traces": 1.5}


def test_shares_are_of_the_same_run_s_cpu_and_count_the_recording_of_spans() -> None:
    told = TelemetryAccount(NAMES, spans_cpu_s=10.0, scrapes_cpu_s=1.0, spans=3000.0)
    began = TelemetryAccount(NAMES, spans_cpu_s=9.9, scrapes_cpu_s=0.8, spans=1000.0)
    cost = StepCost(2.0, 1.0, told.since(began).over(10), record_us=50.0)
    found = shares([cost])
    assert found["share_traces"] == 0.01  # (0.01 + 200 * 50e-6) / 2
    assert found["share_metrics"] == 0.01
    assert found["spans_a_step"] == 200


def test_an_account_that_a_process_is_missing_from_is_refused() -> None:
    began = TelemetryAccount(NAMES, 1.0, 1.0, 1.0)
    ended = TelemetryAccount(frozenset({"reward"}), 2.0, 2.0, 2.0)
    with pytest.raises(RuntimeError, match=r"\['reward', 'trainer'\] and then from \['reward'\]"):
        ended.since(began)


async def test_a_run_tells_what_its_scrapes_and_spans_took(tmp_path: Path) -> None:
    def spin() -> None:
        ends_s = time.thread_time() + SHORT_S
        while time.thread_time() < ends_s:
            pass

    def spinning() -> list[Reading]:
        spin()
        return []

    service = load_config(None, [f"sluice.run_dir={tmp_path}"]).sluice
    who = ProcessName("reward", "reward")
    with served_metrics(service, EndpointConfig(metrics_port=0), who, spinning):
        began = await asyncio.to_thread(telemetry_account, tmp_path)
        SPANS.add(SpanFate.SENT, count=7)
        with TELEMETRY_CPU.charged(Part.SPANS):
            spin()
        ended = await asyncio.to_thread(telemetry_account, tmp_path)
    assert began is not None
    assert ended is not None
    between = ended.since(began)
    assert between.spans_cpu_s >= SHORT_S
    assert between.scrapes_cpu_s >= SHORT_S  # the first answer was not over when it was written
    assert between.spans >= 7


def test_a_run_that_serves_no_metrics_tells_nothing(tmp_path: Path) -> None:
    assert telemetry_account(tmp_path) is None


def test_the_run_with_both_kinds_is_traced_and_served(tmp_path: Path) -> None:
    with KINDS[BOTH](tmp_path) as overrides:
        keys = {override.partition("=")[0] for override in overrides}
    assert "sluice.telemetry.traces.endpoint" in keys
    assert "sluice.trainer.endpoint.metrics_port" in keys


def test_without_telemetry_nothing_is_overridden() -> None:
    with KINDS[OFF](Path("runs")) as overrides:
        assert list(overrides) == []


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_of_ended_children_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as parent:
        until(lambda: cpu_seconds(parent.pid) >= SPUN_S)
        assert parent.stdin is not None
        parent.stdin.close()
