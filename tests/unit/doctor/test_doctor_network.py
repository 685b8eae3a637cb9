"""Findings about peers and ports: where peers are, ports that are really taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sluice.config.addresses import configured_ports
from sluice.doctor.configuration import has_remote_peers
from sluice.doctor.machine import check_ports
from sluice.rpc.ports import bind_socket
from tests.support.doctor_findings import only, run_of


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        (("trainer.nnodes=2",), {}),
        (("sluice.trainer.endpoint.advertise=trainer",), {}),
        (("sluice.reward.endpoint.host=10.0.0.7",), {}),
        ((), {"MASTER_ADDR": "10.0.0.7"}),
    ],
)
def test_peers_elsewhere_are_seen_in_the_configuration(
    settings: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert has_remote_peers(run_of(*settings, environment=environment))
    assert not has_remote_peers(run_of())


@pytest.fixture
def kept_port() -> Iterator[int]:
    """Free for a server: nobody listens, and nobody else is given it meanwhile."""
    with bind_socket("127.0.0.1", 0) as bound:
        yield bound.getsockname()[1]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken_is_a_problem(taken_port: int) -> None:
    found = only(check_ports(run_of(f"sluice.reward.endpoint.port={taken_port}")), "problem")
    assert f"sluice.reward.endpoint.port = {taken_port}" in found.what
    assert "end the process that holds it" in found.remedy


def test_free_ports_are_fine_and_every_port_of_an_endpoint_is_tried(kept_port: int) -> None:
    examined = run_of(
        f"sluice.trainer.endpoint.port={kept_port}",
        f"sluice.trainer.endpoint.health_port={kept_port}",
        f"sluice.reward.endpoint.metrics_port={kept_port}",
        f"sluice.dashboard.port={kept_port}",
    )
    assert {key for key, _, _ in configured_ports(examined.config.sluice)} == {
        "sluice.trainer.endpoint.port",
        "sluice.trainer.endpoint.health_port",
        "sluice.reward.endpoint.metrics_port",
        "sluice.dashboard.port",
    }
    only(check_ports(examined), "ok")
    assert "the run chooses all ports" in only(check_ports(run_of()), "ok").what


def test_an_interface_that_is_not_here_is_a_problem() -> None:
    examined = run_of(
        "sluice.trainer.endpoint.host=198.51.100.7", "sluice.trainer.endpoint.port=7000"
    )
    assert "cannot listen there" in only(check_ports(examined), "problem").what
