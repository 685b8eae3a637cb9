"""What the benchmark of telemetry makes of its measurements, and how it measures CPU."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_telemetry import (
    ROOT,
    RoundFigures,
    Switch,
    main,
    report,
    reported_run,
    shares,
)
from benchmarks.metrics_scraper import TelemetryAccount, telemetry_account
from benchmarks.process_cpu import cpu_seconds
from benchmarks.step_regression import MeasuredStep, added
from sluice.config.loading.loader import load_config
from sluice.config.schema.service import EndpointConfig
from sluice.rpc.metrics import ProcessName, served_metrics
from sluice.telemetry.metrics import InstrumentReading
from sluice.telemetry.process import SPANS, TELEMETRY_CPU, SpanOutcome, TelemetryPart

SPUN_S, SHORT_S = 0.3, 0.05
NAMES = frozenset({"trainer", "reward"})
SPIN = f"import time\nwhile time.process_time() < {SPUN_S}: pass"
# Answers a line when it records as the line says.
TRACED = """
import sys, time
sys.path.insert(0, "")
from sluice.telemetry.tracing import TRACER
TRACER.start([], 1.0)
for line in sys.stdin:
    ends_s = time.monotonic() + 20
    while str(TRACER.is_on) != line.strip():
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    print(line, end="", flush=True)
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {SPIN!r}])
sys.stdin.read()
"""


def steps_of(on_s: float, count: int = 40) -> list[MeasuredStep]:
    """Steps of different sizes that cost what their tokens do, and `on_s` where telemetry is on."""
    found = []
    for number in range(count):
        generated, trained = 1000.0 + 37 * (number % 7), 500.0 + 11 * (number % 5)
        is_on = number // 2 % 2 == 0
        seconds = 0.1 + 1e-4 * generated + 2e-4 * trained + on_s * is_on
        found.append(MeasuredStep(seconds, is_on, generated, trained))
    return found


def test_what_telemetry_adds_is_told_apart_from_the_work_that_a_step_was() -> None:
    steps = steps_of(on_s=0.03)
    mean = sum(step.seconds for step in steps) / len(steps)
    assert added(steps).share == pytest.approx(0.03 / mean)
    assert added(steps_of(on_s=0.0)).share == pytest.approx(0.0, abs=1e-9)


def test_what_telemetry_adds_rarely_and_much_counts() -> None:
    steps = steps_of(on_s=0.0)
    on = [number for number, step in enumerate(steps) if step.is_on]
    for number in on[::10]:
        steps[number] = replace(steps[number], seconds=steps[number].seconds + 0.1)
    mean = sum(step.seconds for step in steps) / len(steps)
    assert added(steps).share == pytest.approx(0.01 / mean, rel=0.3)


def test_the_error_is_how_far_the_figure_scatters() -> None:
    random = np.random.default_rng(0)
    found = [
        added(
            [
                replace(step, seconds=step.seconds + jitter)
                for step, jitter in zip(
                    steps_of(on_s=0.0), random.normal(0.0, 0.01, 40).tolist(), strict=True
                )
            ]
        )
        for _ in range(300)
    ]
    scatter = float(np.std([one.share for one in found]))
    assert float(np.mean([one.error for one in found])) == pytest.approx(scatter, rel=0.15)


def test_a_switch_that_was_never_turned_says_nothing() -> None:
    steps = [replace(step, is_on=True) for step in steps_of(on_s=0.0)]
    with pytest.raises(ValueError, match=r"switch at \{True\}"):
        added(steps)


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--steps", "15"], ["--warm-up", "0"]])
def test_too_little_to_measure_is_refused_before_anything_runs(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_only_settled_steps_whose_both_ends_were_seen_are_measured() -> None:
    seen = RoundFigures(is_on={number: number > 4 for number in range(2, 10)})
    rows = [
        {"accounts/generated_tokens": 10.0 * step, "perf/total_num_tokens": float(step)}
        for step in range(1, 10)
    ]
    ends_s = {number: float(number) for number in range(1, 10) if number != 8}
    measured = seen.steps(ends_s, rows, first=4)
    # Step 5 and 6 follow a turn, and the end of step 8 was not seen.
    assert measured == [
        MeasuredStep(1.0, False, 10.0, 4.0),
        MeasuredStep(1.0, True, 10.0, 7.0),
    ]


def test_overheads_are_means_of_rounds_with_their_error_and_other_figures_medians() -> None:
    found = report(
        [
            {"overhead": value, "overhead_error": 0.3, "share_traces": value}
            | {"overhead_wall": 0.0, "overhead_wall_error": 0.6}
            for value in (4.0, 1.0, 1.0)
        ]
    )
    assert (found["overhead"], found["share_traces"]) == (2.0, 1.0)
    assert (found["overhead_error"], found["overhead_wall_error"]) == (1.0, 0.3464)
    assert found["overhead_rounds"] == [4.0, 1.0, 1.0]


def test_shares_are_of_the_cpu_of_steps_with_telemetry_and_count_the_recording_of_spans() -> None:
    reported = TelemetryAccount(NAMES, spans_cpu_s=10.0, scrapes_cpu_s=1.0, spans=3000.0)
    began = TelemetryAccount(NAMES, spans_cpu_s=9.9, scrapes_cpu_s=0.8, spans=1000.0)
    found = shares(reported.since(began), cpu_s=20.0, num_steps=10, recording_us=50.0)
    assert found["share_traces"] == pytest.approx(0.01)  # (0.1 + 2000 * 50e-6) / 20
    assert found["share_metrics"] == pytest.approx(0.01)
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

    def spinning() -> list[InstrumentReading]:
        spin()
        return []

    service = load_config(None, [f"sluice.run_dir={tmp_path}"]).sluice
    who = ProcessName("reward", "reward")
    with served_metrics(service, EndpointConfig(metrics_port=0), who, spinning):
        began = await asyncio.to_thread(telemetry_account, tmp_path)
        SPANS.add(SpanOutcome.SENT, count=7)
        with TELEMETRY_CPU.charged(TelemetryPart.SPANS):
            spin()
        ended = await asyncio.to_thread(telemetry_account, tmp_path)
    between = ended.since(began)
    assert between.spans_cpu_s >= SHORT_S
    assert between.scrapes_cpu_s >= SHORT_S  # the first answer was not over when it was written
    assert between.spans >= 7


def test_a_run_that_serves_no_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="serves metrics"):
        telemetry_account(tmp_path)


def test_a_measured_run_is_traced_and_served_while_its_switch_is_on(tmp_path: Path) -> None:
    switch = Switch(tmp_path / "on")
    with reported_run(tmp_path, switch) as overrides:
        keys = {override.partition("=")[0] for override in overrides}
    assert "sluice.telemetry.traces.endpoint" in keys
    assert "sluice.trainer.endpoint.metrics_port" in keys
    assert switch.is_on()
    switch.turn(on=False)
    assert not switch.is_on()


def test_a_process_with_the_switch_records_only_while_it_is_on(tmp_path: Path) -> None:
    switch = Switch(tmp_path / "on")
    with subprocess.Popen(
        [sys.executable, "-c", TRACED],
        cwd=ROOT,
        env=switch.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for wanted in (False, True):
            switch.turn(on=wanted)
            process.stdin.write(f"{wanted}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{wanted}\n"
        process.stdin.close()


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
