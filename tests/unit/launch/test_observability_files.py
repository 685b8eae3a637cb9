"""The observability profile: its files fit each other, the layout and the run that it watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.config.loading.loader import load_config
from sluice.config.rules.checks import relation_problems
from sluice.launch.network_layout import (
    COLLECTOR,
    KINDS,
    OBSERVED_VARIABLE,
    SERVICE_PORTS,
    network_settings,
    observed_settings,
)
from sluice.service_contract import CONFIG_NAME
from tests.support.source_tree import ROOT
from tests.unit.cli.test_prepare_command import model_and_data

pytestmark = pytest.mark.usefixtures("tried_scorers")

PROFILE = ROOT / "deploy" / "observability"


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


OVERLAY = read("compose.observability.yaml")["services"]


def jobs() -> dict[str, Any]:
    config = read("deploy/observability/prometheus/prometheus.yml")
    return {job["job_name"]: job for job in config["scrape_configs"]}


def test_prometheus_looks_for_every_service_at_its_port_of_the_layout() -> None:
    found = {
        name: entry["port"]
        for entry in jobs()["sluice"]["dns_sd_configs"]
        for name in entry["names"]
    }
    assert found == {kind: SERVICE_PORTS[kind].metrics_port for kind in KINDS}
    assert {entry["type"] for entry in jobs()["sluice"]["dns_sd_configs"]} == {"A"}


def test_an_observed_run_serves_where_prometheus_looks_and_sends_where_the_collector_takes() -> (
    None
):
    config = load_config(None, [*network_settings(), *observed_settings()]).sluice
    for kind in KINDS:
        assert getattr(config, kind).endpoint.metrics_port == SERVICE_PORTS[kind].metrics_port
    assert config.telemetry.traces.endpoint == COLLECTOR
    receivers = read("deploy/observability/collector/collector.yaml")["receivers"]
    taken = receivers["otlp"]["protocols"]["grpc"]["endpoint"]
    host, port = COLLECTOR.removeprefix("http://").split(":")
    assert host in OVERLAY
    assert taken == f"0.0.0.0:{port}"


def test_a_run_is_observed_by_the_variable_that_the_overlay_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = model_and_data(tmp_path / "job")
    ports = []
    for run, environment in (("plain", {}), ("observed", OVERLAY["prepare"]["environment"])):
        folder = tmp_path / run
        arguments = ["prepare", "--run-dir", str(folder), *job]
        result = CliRunner().invoke(commands, arguments, env={**environment})
        assert result.exit_code == 0, result.output
        ports.append(load_config(folder / CONFIG_NAME, []).sluice.reward.endpoint.metrics_port)
    assert ports == [None, SERVICE_PORTS["reward"].metrics_port]
    assert list(OVERLAY["prepare"]["environment"]) == [OBSERVED_VARIABLE]


def test_the_overlay_publishes_on_loopback_only_and_mounts_what_is_there() -> None:
    for name, service in OVERLAY.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
        mounts = [each for each in service.get("volumes", ()) if each.startswith("./")]
        for mount in mounts:
            source, _, rest = mount.partition(":")
            assert (ROOT / source).is_dir(), mount
            assert rest.endswith(":ro"), mount
        image = service.get("image", "x:y")
        assert ":latest" not in image
        assert ":" in image


def test_grafana_finds_its_sources_and_dashboards_where_the_overlay_puts_them() -> None:
    sources = read("deploy/observability/grafana/provisioning/datasources/sluice.yaml")
    by_uid = {one["uid"]: one for one in sources["datasources"]}
    assert set(by_uid) == {"prometheus", "jaeger"}
    assert [uid for uid, one in by_uid.items() if one.get("isDefault")] == ["prometheus"]
    for uid, one in by_uid.items():
        assert one["url"].startswith(f"http://{uid}:")
        assert uid in OVERLAY
    (provider,) = read("deploy/observability/grafana/provisioning/dashboards/sluice.yaml")[
        "providers"
    ]
    mounts = dict(each.split(":")[:2] for each in OVERLAY["grafana"]["volumes"])
    assert mounts["./deploy/observability/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/observability/grafana/provisioning"] == "/etc/grafana/provisioning"


def test_every_part_of_the_collectors_pipeline_is_defined_and_used() -> None:
    config = read("deploy/observability/collector/collector.yaml")
    (pipeline,) = config["service"]["pipelines"].values()
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) == set(config[part])
    # The limiter has to come before everything that keeps spans.
    assert pipeline["processors"][0] == "memory_limiter"
    exporter = config["exporters"]["otlp/jaeger"]
    assert exporter["endpoint"].split(":")[0] in OVERLAY
    assert OVERLAY["collector"]["command"] == ["--config=/etc/collector/collector.yaml"]


def test_rules_are_loaded_from_files_that_are_there() -> None:
    config = read("deploy/observability/prometheus/prometheus.yml")
    for name in config["rule_files"]:
        assert (PROFILE / "prometheus" / name).is_file()
    tested = read("deploy/observability/prometheus/alerts_test.yml")
    assert tested["rule_files"] == config["rule_files"]


def test_replicas_on_one_host_cannot_share_a_port_of_metrics() -> None:
    port, many = "sluice.rollout.endpoint.metrics_port=7201", "sluice.rollout.replicas=2"
    found = relation_problems(load_config(None, [port, many]))
    assert any("all replicas would take one port; set it to 0" in problem.text for problem in found)
    free = relation_problems(load_config(None, ["sluice.rollout.endpoint.metrics_port=0", many]))
    assert not any("metrics_port" in problem.text for problem in free)
