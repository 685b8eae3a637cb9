"""The one specification of services that have hosts of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.config.loading.loader import load_config
from sluice.launch import container
from sluice.launch.network_layout import (
    CONFIG_FILE,
    DASHBOARD_PORT,
    HEALTH_PROBE,
    KINDS,
    LAUNCHER,
    RUNS_MOUNT,
    SERVICE_PORTS,
    Kind,
    engine_grace_s,
    launcher_grace_s,
    metrics_settings,
    network_settings,
)


def test_no_port_is_given_twice() -> None:
    ports = [
        port
        for place in SERVICE_PORTS.values()
        for port in (place.port, place.health_port, place.metrics_port)
    ]
    assert set(SERVICE_PORTS) == set(KINDS)
    assert len(set(ports)) == len(ports) == 3 * len(KINDS)
    assert DASHBOARD_PORT not in ports


def test_services_take_the_layouts_ports_and_are_scraped_where_it_says() -> None:
    config = load_config(None, [*network_settings(), *metrics_settings()])
    for kind in KINDS:
        endpoint = getattr(config.sluice, kind).endpoint
        place = SERVICE_PORTS[kind]
        assert (endpoint.port, endpoint.health_port, endpoint.metrics_port) == (
            place.port,
            place.health_port,
            place.metrics_port,
        )
        assert endpoint.advertise == kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_containers_words_are_those_that_its_launcher_and_its_probe_take(kind: Kind) -> None:
    options = container._parse((kind, "--config", CONFIG_FILE))
    assert (options.kind, str(options.config)) == (kind, CONFIG_FILE)
    for words in (LAUNCHER, HEALTH_PROBE):
        assert words[:2] == ("python", "-m")
        assert importlib.util.find_spec(words[2]) is not None
    assert CONFIG_FILE.startswith(f"{RUNS_MOUNT}/")


@settings(deadline=None)
@given(st.floats(0.1, 3600.0))
def test_an_engine_waits_longer_than_the_launcher_and_that_longer_than_the_service(
    grace_s: float,
) -> None:
    assert engine_grace_s(grace_s) > launcher_grace_s(grace_s) > grace_s


def test_a_health_probe_loads_nothing_of_the_project_but_the_layout() -> None:
    code = (
        "import sys, sluice.launch.health_probe\n"
        "print(sorted(n for n in sys.modules if n.startswith('sluice')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(
        [
            "sluice",
            "sluice.errors",
            "sluice.launch",
            "sluice.launch.health_probe",
            "sluice.launch.network_layout",
            "sluice.service_contract",
        ]
    )
