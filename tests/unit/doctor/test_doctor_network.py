"""Findings about networks and ports: variables and interfaces, ports that are really taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.doctor.finding import Finding
from sluice.doctor.network import (
    check_network,
    check_ports,
    chosen,
    fixed_ports,
    has_remote_peers,
    network_findings,
    networks_up,
)
from sluice.rpc.ports import bound_socket
from tests.support.doctor_findings import only, run_of, severities

INTERFACES = ("lo", "eth0", "eth1", "docker0")


def found(environment: dict[str, str], *, remote: bool = True) -> list[Finding]:
    return list(network_findings(INTERFACES, environment, is_remote=remote))


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", ["eth0", "eth1"]),
        ("NCCL_SOCKET_IFNAME", "=eth", []),
        ("HCCL_SOCKET_IFNAME", "=eth0,docker0", ["eth0", "docker0"]),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", ["eth0", "eth1"]),
        ("NCCL_SOCKET_IFNAME", "^=eth0", ["lo", "eth1", "docker0"]),
        ("GLOO_SOCKET_IFNAME", "eth", []),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", ["eth0", "eth1"]),
    ],
)
def test_a_value_is_read_as_its_library_reads_it(name: str, value: str, names: list[str]) -> None:
    assert chosen(name, value, INTERFACES) == names


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
@pytest.mark.parametrize(
    ("value", "reported"),
    [("ib0", "no such network is up"), ("lo", "this is the loopback")],
)
def test_a_network_that_peers_cannot_use_is_a_problem(name: str, value: str, reported: str) -> None:
    assert reported in only(found({name: value}), "problem").what


def test_the_loopback_will_do_where_all_processes_are_on_one_host() -> None:
    only(found({"GLOO_SOCKET_IFNAME": "lo"}, remote=False), "ok")
    only(found({"NCCL_SOCKET_IFNAME": "eth0"}), "ok")


def test_several_networks_of_which_none_is_named_are_a_warning_with_peers_elsewhere() -> None:
    assert "eth0, eth1, docker0" in only(found({}), "warning").what
    only(found({}, remote=False), "ok")


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


def test_this_hosts_networks_are_known_and_those_that_are_down_left_out(tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    assert "lo" in networks_up(tmp_path)
    (tmp_path / "lo" / "operstate").write_text("down\n", encoding="ascii")
    assert "lo" not in networks_up(tmp_path)
    assert "problem" not in severities(check_network(run_of()))
    unknown = run_of(environment={"NCCL_SOCKET_IFNAME": "no-such-network"})
    assert severities(check_network(unknown)) == ["problem"]


@pytest.fixture
def kept_port() -> Iterator[int]:
    """Free for a server: nobody listens, and nobody else is given it meanwhile."""
    with bound_socket("127.0.0.1", 0) as bound:
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
    assert {key for key, _, _ in fixed_ports(examined)} == {
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
