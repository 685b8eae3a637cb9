"""A process's metrics: served where a port is set, complete while its loop runs, else partly."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.schema.service import EndpointConfig, SecurityConfig, ServiceConfig
from sluice.errors import ConfigError, EngineError, ExhaustedError, NotReadyError
from sluice.rpc import metrics as module
from sluice.rpc.auth import ClientQuota
from sluice.rpc.credentials import CERTIFICATE_ENDS, service_credentials
from sluice.rpc.metrics import DiskSpace, ProcessName, process_readings, serve_metrics
from sluice.security.certificates import ends_of_validity
from sluice.security.development_ca import DevelopmentCa
from sluice.telemetry.metric_names import Instrument
from sluice.telemetry.metrics import InstrumentReading
from tests.support.certified import authority, write_security
from tests.support.scraped import fetch, names, parsed, targets, value
from tests.support.source_tree import ROOT

LEVEL = Instrument(name="sluice_level", unit="metres", meaning="Of the water.")
WHO = ProcessName("reward", "reward", 2)


def settings(run_dir: Path) -> ServiceConfig:
    return load_config(None, [f"sluice.run_dir={run_dir}"]).sluice


def level() -> list[InstrumentReading]:
    return [InstrumentReading(LEVEL, 3.0)]


async def test_the_page_holds_the_services_readings_and_those_of_every_process(
    tmp_path: Path,
) -> None:
    pytest.importorskip("prometheus_client")
    service = settings(tmp_path)
    with serve_metrics(service, EndpointConfig(metrics_port=0), WHO, level):
        (address,) = targets(tmp_path).values()
        page = parsed(await asyncio.to_thread(fetch, address))
    assert value(page, "sluice_level") == 3.0
    assert value(page, "sluice_scrape_complete") == 1.0
    assert value(page, "sluice_process_restarts_total") == 2.0
    assert value(page, "sluice_run_folder_free_bytes") > 0
    assert targets(tmp_path) == {}


async def test_a_blocked_loop_leaves_a_page_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(module, "_LOOP_TIMEOUT_S", 0.05)
    with serve_metrics(settings(tmp_path), EndpointConfig(metrics_port=0), WHO, level):
        (address,) = targets(tmp_path).values()
        scrape = subprocess.Popen(
            [
                *(sys.executable, "-c"),
                "import sys, urllib.request as u; "
                f"sys.stdout.write(u.urlopen('http://{address}/metrics').read().decode())",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        text = scrape.communicate(timeout=30)[0]  # the loop does not run meanwhile
    page = parsed(text)
    assert value(page, "sluice_scrape_complete") == 0.0
    assert "sluice_level" not in names(page)
    assert "sluice_process_uptime_seconds" in names(page)


async def test_without_a_port_nothing_is_served(tmp_path: Path) -> None:
    def unread() -> list[InstrumentReading]:
        raise AssertionError("read")

    with serve_metrics(settings(tmp_path), EndpointConfig(), WHO, unread):
        assert list(tmp_path.iterdir()) == []


def test_services_without_a_port_load_no_client_of_prometheus() -> None:
    code = (
        "import sys, services.reward.__main__, services.rollout.telemetry\n"
        "import services.trainer.telemetry\n"
        "sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


async def test_the_error_for_a_taken_port_names_the_remedy(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    first = EndpointConfig(metrics_port=0)
    with serve_metrics(settings(tmp_path), first, WHO, level):
        (address,) = targets(tmp_path).values()
        port = int(address.rpartition(":")[2])
        second = serve_metrics(settings(tmp_path), EndpointConfig(metrics_port=port), WHO, level)
        with pytest.raises(ConfigError, match=f"port {port}"), second:
            pass


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_a_port_that_other_machines_reach_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, warns: bool
) -> None:
    pytest.importorskip("prometheus_client")
    endpoint = EndpointConfig(host=host, advertise="reward", metrics_port=0)
    with (
        caplog.at_level(logging.WARNING),
        serve_metrics(settings(tmp_path), endpoint, WHO, level),
    ):
        (address,) = targets(tmp_path).values()
    assert address.startswith("reward:")
    assert ("without a token" in caplog.text) is warns


@pytest.mark.parametrize("error", [EngineError("its core died"), NotReadyError("no weights")])
async def test_a_service_whose_numbers_cannot_be_read_leaves_a_page_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    pytest.importorskip("prometheus_client")

    def broken() -> list[InstrumentReading]:
        raise error

    with serve_metrics(settings(tmp_path), EndpointConfig(metrics_port=0), WHO, broken):
        (address,) = targets(tmp_path).values()
        for _ in range(2):
            page = parsed(await asyncio.to_thread(fetch, address))
    assert value(page, "sluice_scrape_complete") == 0.0
    assert "sluice_process_uptime_seconds" in names(page)
    assert caplog.text.count("cannot be read") == 1
    assert str(error) in caplog.text


async def test_a_file_system_that_hangs_silences_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    resume = threading.Event()

    def hangs(folder: Path) -> None:
        resume.wait(60)
        raise OSError

    monkeypatch.setattr(module.os, "statvfs", hangs)
    with serve_metrics(settings(tmp_path), EndpointConfig(metrics_port=0), WHO, level):
        (address,) = targets(tmp_path).values()
        page = parsed(await asyncio.to_thread(fetch, address))
        resume.set()
    assert value(page, "sluice_level") == 3.0
    assert "sluice_run_folder_free_bytes" not in names(page)


def reported(run_dir: Path) -> dict[tuple[Any, ...], Any]:
    disk = DiskSpace("disk space", lambda: module.disk_capacity(run_dir))
    return {(r.instrument.name, *r.labels): r.value for r in process_readings(WHO, disk)}


def test_a_refusal_by_a_quota_is_counted_under_its_setting(tmp_path: Path) -> None:
    key = ("sluice_quota_refusals_total", "sluice.limits.of_a_test")
    quota = ClientQuota(1, "things", key[1])
    with quota.hold("a", 1), pytest.raises(ExhaustedError), quota.hold("a", 1):
        pass
    assert reported(tmp_path)[key] == 1.0


def test_counters_of_spans_are_there_before_the_first_span(tmp_path: Path) -> None:
    counters = {name for name in reported(tmp_path) if name[0] == "sluice_telemetry_spans_total"}
    assert counters == {
        ("sluice_telemetry_spans_total", outcome) for outcome in ("sent", "dropped")
    }


def test_the_longest_wait_is_a_metric_and_a_folder_elsewhere_is_not(tmp_path: Path) -> None:
    from sluice.concurrency.waits import waiting_for

    with waiting_for("peer", "something") as before:
        before.since_s -= 100.0
        found = reported(tmp_path / "absent")
    assert found[("sluice_watchdog_longest_wait_seconds",)] >= 100.0
    assert ("sluice_run_folder_free_bytes",) not in found


def test_the_end_of_loaded_certificates_is_a_metric(tmp_path: Path) -> None:
    CERTIFICATE_ENDS.clear()
    service_credentials(SecurityConfig(), EndpointConfig())
    name = "sluice_certificate_end_seconds"
    assert name not in {key[0] for key in reported(tmp_path)}
    given = write_security(tmp_path)
    ca_file = Path(given["ca_file"])
    ca_file.write_bytes(DevelopmentCa(-1).ca.certificate + ca_file.read_bytes())
    service_credentials(SecurityConfig(**given), EndpointConfig())
    signed = Path(given["cert_file"]).read_bytes()
    for file in ("cert_file", "ca_file"):  # what is put in their place later is not loaded
        Path(given[file]).unlink()
    found = reported(tmp_path)
    signer = authority("ours").ca.certificate
    assert found[name, "cert_file"] == ends_of_validity(signed)[0].timestamp()
    assert found[name, "ca_file"] == ends_of_validity(signer)[0].timestamp()
    CERTIFICATE_ENDS.clear()
