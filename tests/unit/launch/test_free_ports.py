"""Ports chosen for services that start later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sluice.errors import ConfigError
from sluice.launch import service_spec as module
from sluice.launch.service_spec import free_ports

HOST = "127.0.0.1"


def test_ports_differ_and_can_be_bound_afterwards() -> None:
    ports = free_ports([HOST] * 20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server((HOST, port)):
            pass


@pytest.fixture
def ephemeral(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which the system says which ports it chooses from."""
    path = tmp_path / "range"
    monkeypatch.setattr(module, "_EPHEMERAL", path)
    return path


def test_ports_come_from_below_those_that_the_system_gives_to_connections(
    ephemeral: Path,
) -> None:
    ephemeral.write_text("20100\t60999\n")
    assert all(20_000 <= port < 20_100 for port in free_ports([HOST] * 20))


def test_ports_that_others_are_going_to_take_are_passed_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = free_ports([HOST, HOST])
    monkeypatch.setattr(module._random, "sample", lambda _range, _count: [first, second])
    assert free_ports([HOST], besides={first}) == [second]


def test_taken_ports_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_ports([HOST, HOST])
    monkeypatch.setattr(module._random, "sample", lambda _range, _count: [first, second])
    with socket.create_server((HOST, first)):
        assert free_ports([HOST]) == [second]


def test_where_all_are_taken_the_system_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports([HOST])
    monkeypatch.setattr(module._random, "sample", lambda _range, _count: [taken])
    with socket.create_server((HOST, taken)):
        (port,) = free_ports([HOST])
    assert port != taken


def test_where_the_ephemeral_range_begins_below_the_system_chooses(
    monkeypatch: pytest.MonkeyPatch, ephemeral: Path
) -> None:
    ephemeral.write_text("1024\t65535\n")
    asked = list[int]()
    listening_at = module._listen_at

    def recorded(host: str, port: int) -> socket.socket:
        asked.append(port)
        return listening_at(host, port)

    monkeypatch.setattr(module, "_listen_at", recorded)
    free_ports([HOST])
    assert asked == [0]


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*use an address of this machine"):
        free_ports(["192.0.2.1"])
