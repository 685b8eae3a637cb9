"""host:port, written and read."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.addresses import (
    advertised_address,
    advertised_host,
    join_host_port,
    peer_address,
    split_host_port,
)
from sluice.config.schema.service import EndpointConfig
from sluice.errors import ConfigError

HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{2,5}){0,2}", fullmatch=True),
)


@given(host=HOSTS, port=st.integers(1, 65535))
def test_what_was_joined_comes_apart_again(host: str, port: int) -> None:
    assert split_host_port(join_host_port(host, port)) == (host, port)
    assert split_host_port(host) == (host, None)


@given(address=st.ip_addresses(v=6), port=st.integers(1, 65535))
def test_brackets_around_an_address_change_nothing(
    address: ipaddress.IPv6Address, port: int
) -> None:
    assert split_host_port(f"[{address}]") == (str(address), None)
    assert join_host_port(f"[{address}]", port) == join_host_port(str(address), port)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("node-3", "node-3", None),
        ("node-3.cluster:7001", "node-3.cluster", 7001),
        ("10.0.0.1", "10.0.0.1", None),
        ("10.0.0.1:7001", "10.0.0.1", 7001),
        ("::1", "::1", None),
        ("[::1]", "::1", None),
        ("[::1]:7001", "::1", 7001),
        ("fe80::1%eth0", "fe80::1%eth0", None),
        ("[fe80::1%eth0]:7001", "fe80::1%eth0", 7001),
    ],
)
def test_names_and_addresses_of_both_families_are_read(
    address: str, host: str, port: int | None
) -> None:
    assert split_host_port(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        *("", ":7001", "host:", "host:x", "host:0", "host:65536", "host:-1", "host:1 ", "host:²"),
        *("[::1", "::1]", "[::1]7001", "[::1]:", "[host]:7001", "[]:7001", "[[::1]]"),
        *("a:b:7001", "1:2:3", "dns:///host:7001", "http://host"),
    ],
)
def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port") as caught:
        split_host_port(address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "advertised", "host"),
    [
        (EndpointConfig(host="10.0.0.1"), "10.0.0.1:5", "10.0.0.1"),
        (EndpointConfig(host="::1"), "[::1]:5", "::1"),
        (EndpointConfig(host="[::1]"), "[::1]:5", "::1"),
        (EndpointConfig(host="::", advertise="node:9"), "node:9", "node"),
        (EndpointConfig(host="::", advertise="[fd00::1]:9"), "[fd00::1]:9", "fd00::1"),
        (EndpointConfig(host="::", advertise="fd00::1"), "[fd00::1]:5", "fd00::1"),
        (EndpointConfig(host="0.0.0.0", advertise="node"), "node:5", "node"),
    ],
)
def test_a_server_is_advertised_with_brackets_where_they_belong(
    endpoint: EndpointConfig, advertised: str, host: str
) -> None:
    assert advertised_address(endpoint, 5) == advertised
    assert advertised_host(endpoint) == host


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        (EndpointConfig(host="10.0.0.1", port=7), "10.0.0.1:7"),
        (EndpointConfig(host="::1", port=7), "[::1]:7"),
        (EndpointConfig(host="::", port=7, advertise="[fd00::1]:9"), "[fd00::1]:9"),
        (EndpointConfig(host="::", port=7, advertise="fd00::1"), "[fd00::1]:7"),
    ],
)
def test_a_peer_is_found_at_what_it_advertises_else_where_it_listens(
    endpoint: EndpointConfig, address: str
) -> None:
    assert peer_address(endpoint, "sluice.reward.endpoint") == address


@pytest.mark.parametrize("advertise", [None, "node"])
def test_a_peer_without_any_port_cannot_be_found(advertise: str | None) -> None:
    with pytest.raises(ConfigError, match=r"sluice\.reward\.endpoint: neither advertise nor port"):
        peer_address(EndpointConfig(advertise=advertise), "sluice.reward.endpoint")
