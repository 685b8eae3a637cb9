"""Whether a server could listen somewhere, and why not."""

from __future__ import annotations

import socket

import pytest

from sluice.errors import ConfigError
from sluice.rpc.ports import bound_socket, check_bindable
from tests.support.loopback import needs_ipv6


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_bound_socket_keeps_its_port_from_others(host: str) -> None:
    with bound_socket(host, 0) as held:
        port = held.getsockname()[1]
        with held.__class__(held.family) as other, pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())
    assert port


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_is_bound_with_and_without_brackets(host: str) -> None:
    with bound_socket(host, 0) as held:
        assert held.family is socket.AF_INET6
        assert held.getsockname()[0] == "::1"


@needs_ipv6
def test_a_port_in_use_on_ipv6_is_named() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on ::1 is in use; .* set another"):
            check_bindable("::1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_a_foreign_interface_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host {host}, port 0: cannot listen there"):
        check_bindable(host, 0)
