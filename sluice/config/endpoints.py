"""Addresses from endpoint settings."""

from __future__ import annotations

from sluice.config.service import EndpointConfig
from sluice.errors import ConfigError


def advertised_address(endpoint: EndpointConfig, port: int) -> str:
    """host:port that peers use for a server bound to `port`."""
    return endpoint.advertise or f"{endpoint.host}:{port}"


def peer_address(endpoint: EndpointConfig, path: str) -> str:
    """host:port of a peer that listens elsewhere.

    Raises:
        ConfigError: neither `advertise` nor a port is set.
    """
    if endpoint.advertise:
        return endpoint.advertise
    if endpoint.port == 0:
        raise ConfigError(
            f"{path}: neither advertise nor port is set, so peers cannot find the service; "
            "set one, or start the run with `sluice up`, which chooses ports"
        )
    return f"{endpoint.host}:{endpoint.port}"
