"""Addresses from endpoint settings."""

from __future__ import annotations

from sluice.config.host_port import join_host_port, split_host_port
from sluice.config.service import EndpointConfig
from sluice.errors import ConfigError


def advertised_address(endpoint: EndpointConfig, port: int) -> str:
    """host:port that peers use for a server bound to `port`.

    Raises:
        ConfigError: `advertise` is no address.
    """
    host, advertised_port = split_host_port(endpoint.advertise or endpoint.host)
    return join_host_port(host, advertised_port or port)


def advertised_host(endpoint: EndpointConfig) -> str:
    """The host that peers use, without port and brackets.

    Raises:
        ConfigError: `advertise` is no address.
    """
    return split_host_port(endpoint.advertise or endpoint.host)[0]


def peer_address(endpoint: EndpointConfig, path: str) -> str:
    """host:port of a peer that listens elsewhere.

    Raises:
        ConfigError: no port is set, neither in `advertise` nor beside it, or `advertise` is no
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
