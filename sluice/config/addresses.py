"""Split and join host:port, and derive addresses from endpoint settings."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from sluice.config.schema.service import EndpointConfig, ServiceConfig
from sluice.errors import ConfigError

_LARGEST_PORT = 65535


def bare_host(host: str) -> str:
    """Return a host in the form for sockets: an IPv6 address without brackets."""
    return host.removeprefix("[").removesuffix("]")


def join_host_port(host: str, port: int) -> str:
    """Return host:port, with brackets around an address of IPv6."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_host_port(address: str) -> tuple[str, int | None]:
    """Return the host, without brackets, and the port; None if there is none.

    Takes names, addresses of IPv4 and IPv6; IPv6 addresses stand in brackets if a port follows.

    Raises:
        ConfigError: `address` is none of these.
    """
    host, port = _split_address(address)
    if not host or any(sign in host for sign in "[]/"):
        raise _address_error(address)
    if ":" in host:
        _check_ipv6(host, address)
    if port is None:
        return host, None
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= _LARGEST_PORT):
        raise _address_error(address)
    return host, int(port)


def _split_address(address: str) -> tuple[str, str | None]:
    if address.startswith("["):
        host, closing, suffix = address[1:].partition("]")
        if not closing or ":" not in host or suffix[:1] not in {"", ":"}:
            raise _address_error(address)
        return host, suffix[1:] if suffix else None
    if address.count(":") == 1:
        host, _, port = address.partition(":")
        return host, port
    return address, None


def _check_ipv6(host: str, address: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError as error:
        raise _address_error(address) from error


def _address_error(address: str) -> ConfigError:
    return ConfigError(
        f"address {address!r} is not host:port; write name:7001, 10.0.0.1:7001 or [fd00::1]:7001 "
        f"(ports 1 to {_LARGEST_PORT})"
    )


def is_loopback(host: str) -> bool:
    """Return whether `host` means only addresses of this machine."""
    try:
        infos = socket.getaddrinfo(bare_host(host), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    # A link-local address carries its interface after a percent sign.
    addresses = {str(address[0]).partition("%")[0] for *_, address in infos}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def advertised_address(endpoint: EndpointConfig, port: int) -> str:
    """Return the host:port at which peers reach a server that is bound to `port`.

    Raises:
        ConfigError: `advertise` is no address.
    """
    host, advertised_port = split_host_port(endpoint.advertise or endpoint.host)
    return join_host_port(host, advertised_port or port)


def advertised_host(endpoint: EndpointConfig) -> str:
    """Return the host that peers use, without port and brackets.

    Raises:
        ConfigError: `advertise` is no address.
    """
    return split_host_port(endpoint.advertise or endpoint.host)[0]


def peer_address(endpoint: EndpointConfig, path: str) -> str:
    """Return host:port of a peer that listens elsewhere.

    Raises:
        ConfigError: no port is set, neither in `advertise` nor separately, or `advertise` is no
            address.
    """
    host, advertised_port = split_host_port(endpoint.advertise or endpoint.host)
    port = advertised_port or endpoint.port
    if port == 0:
        raise ConfigError(
            f"{path}: neither advertise nor port is set, so peers cannot find the service; "
            "set one, or start the run with `sluice up`, which chooses ports"
        )
    return join_host_port(host, port)


def configured_ports(service: ServiceConfig) -> Iterator[tuple[str, str, int]]:
    """Yield key, host and port of every port that is set, of endpoints and the dashboard."""
    for kind in ("trainer", "reward", "rollout"):
        endpoint = getattr(service, kind).endpoint
        for name in ("port", "health_port", "metrics_port"):
            if port := getattr(endpoint, name):
                yield f"sluice.{kind}.endpoint.{name}", endpoint.host, port
    if service.dashboard.port:
        yield "sluice.dashboard.port", service.dashboard.host, service.dashboard.port
