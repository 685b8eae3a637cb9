"""Ports chosen for services that start later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sluice.errors import ConfigError
from sluice.launch import free_ports as module
from sluice.launch.free_ports import free_ports

HOST = "127.0.0.1"


def test_ports_differ_and_can_be_bound_afterwards() -> None:
    ports = free_ports([HOST] * 20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server((HOST, port)):
            pass


def test_the_system_never_gives_them_to_others_meanwhile() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(20_000 <= port < min(30_000, lowest) for port in free_ports([HOST] * 20))


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


def test_a_machine_whose_own_range_begins_below_has_the_system_choose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wide = tmp_path / "range"
    wide.write_text("1024\t65535\n")
    monkeypatch.setattr(module, "_SYSTEMS_RANGE", wide)
    assert len(free_ports([HOST])) == 1


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*use an address of this machine"):
        free_ports(["192.0.2.1"])
