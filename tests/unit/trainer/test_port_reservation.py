"""A port that is kept until its server starts."""

from __future__ import annotations

import socket

import pytest

from services.trainer.start import PortReservation
from sluice.errors import ConfigError

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def test_a_port_in_use_is_refused_with_a_remedy() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on {HOST} is in use; end the process"):
            PortReservation(HOST, port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host 192\.0\.2\.1, port 7: cannot listen there"):
        PortReservation("192.0.2.1", 7)


def test_while_it_is_kept_nobody_is_answered_and_nobody_else_gets_it() -> None:
    port = free_port()
    with PortReservation(HOST, port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=5)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))


def test_a_released_port_can_be_served_at_once() -> None:
    port = free_port()
    with PortReservation(HOST, port) as reservation:
        reservation.release()
        with socket.create_server((HOST, port)):
            pass


def test_port_0_reserves_nothing() -> None:
    with PortReservation(HOST, 0):
        pass
