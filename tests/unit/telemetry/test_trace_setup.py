"""Whether a process is traced: off by default, and then nothing of OpenTelemetry is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.telemetry.trace_setup import collector_url, trace_process
from sluice.telemetry.tracing import TRACER, SpanName, TraceContext
from tests.support.seen_spans import spans_in
from tests.support.source_tree import ROOT

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SERVICES_THAT_LOAD_NOTHING = """
import sys
import services.reward.__main__
import services.rollout.__main__
import services.trainer.__main__
import msgspec
from sluice.config.run import RunConfig
from sluice.telemetry.trace_setup import trace_process
from sluice.telemetry.tracing import TraceContext
from sluice.telemetry.tracing import TRACER
with trace_process(msgspec.convert({tree!r}, RunConfig), "reward", "reward"):
    print(TRACER.is_on, any(name.split(".")[0] == "opentelemetry" for name in sys.modules))
"""
NO_PACKAGES = """
import sys
sys.modules["opentelemetry"] = None
from sluice.errors import ConfigError
try:
    import sluice.telemetry.otel
except ConfigError as error:
    print(error)
"""


def config(tmp_path: Path, **traces: Any) -> RunConfig:
    tree = {"sluice": {"run_dir": str(tmp_path), "telemetry": {"traces": traces}}}
    return msgspec.convert(tree, RunConfig)


def printed(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={ENDPOINT: "http://127.0.0.1:1", "PYTHONPATH": ":".join(sys.path)},
    )
    return done.stdout.strip()


def test_by_default_nothing_is_traced_and_no_package_is_loaded_whatever_the_environment_says() -> (
    None
):
    assert printed(SERVICES_THAT_LOAD_NOTHING.format(tree={})) == "False False"


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    found = printed(NO_PACKAGES)
    assert "sluice[traces]" in found
    assert "sluice.telemetry.traces.endpoint" in found


def test_a_file_is_looked_for_in_the_runs_folder_and_holds_the_last_span(tmp_path: Path) -> None:
    with trace_process(config(tmp_path, file="traces.jsonl", sample_ratio=1), "trainer", "trainer"):
        assert TRACER.is_on
        TRACER.trace(SpanName.STEP).end()
    assert not TRACER.is_on
    (span,) = spans_in(tmp_path / "traces.jsonl")
    assert (span.name, span.service) == ("step", "sluice-trainer")


def test_by_default_one_trace_in_ten_is_recorded_and_every_step(tmp_path: Path) -> None:
    with trace_process(config(tmp_path, file="traces.jsonl"), "reward", "reward"):
        for share in (0.09, 0.11):
            TRACER.trace(SpanName.PROMPT, trace_id=round(share * 2**64)).end()
        TRACER.trace(SpanName.STEP, is_always=True).end()
    assert [span.name for span in spans_in(tmp_path / "traces.jsonl")] == ["prompt", "step"]


def test_nothing_is_written_for_traces_that_were_not_chosen(tmp_path: Path) -> None:
    chosen = config(tmp_path, file="traces.jsonl", sample_ratio=0.0)
    with trace_process(chosen, "reward", "reward"):
        TRACER.trace(SpanName.PROMPT).end()
    assert not (tmp_path / "traces.jsonl").exists()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://collector:4317", "http://collector:4317"),
        ("https://collector:443/", "https://collector:443"),
        ("collector:9999", "http://collector:9999"),
        ("collector", "http://collector:4317"),
        ("http://[::1]:4317", "http://[::1]:4317"),
    ],
)
def test_an_address_is_plain_and_at_the_usual_port_unless_it_says_otherwise(
    given: str, url: str
) -> None:
    assert collector_url(given) == url


@pytest.mark.parametrize(
    "given", ["grpc://collector:4317", "http://", "http://a:b", "http://a:4318/v1/traces"]
)
def test_what_is_no_address_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=r"sluice\.telemetry\.traces\.endpoint"):
        collector_url(given)


def test_the_keys_bound_the_file_and_what_callers_decide(tmp_path: Path) -> None:
    full = tmp_path / "traces.jsonl"
    full.write_bytes(bytes(1 << 20))
    for follows in (False, True):
        chosen = config(tmp_path, file=full.name, file_mb=1, follow_callers=follows, sample_ratio=0)
        with trace_process(chosen, "trainer", "trainer"):
            TRACER.trace(SpanName.STEP, is_always=True).end()
            assert TRACER.admit(TraceContext(1, 2, is_sampled=True)).is_sampled is follows
    assert full.stat().st_size == 1 << 20


def test_by_default_a_caller_does_not_decide_how_much_is_recorded() -> None:
    assert config(Path("run")).sluice.telemetry.traces.follow_callers is False
