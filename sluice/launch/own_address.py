"""By which address a host is reached from where a peer is."""

from __future__ import annotations

import socket

from sluice.errors import ConfigError

_ANY_PORT = 9  # nothing is sent


def own_address(peer_host: str) -> str:
    """This host's address on the network that leads to `peer_host`; no packet is sent.

    Raises:
        ConfigError: the name is unknown, or no network leads there.
    """
    try:
        found = socket.getaddrinfo(peer_host, _ANY_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"{peer_host} cannot be reached from here ({error}); are both in one network, and is "
            "sluice.trainer.endpoint.advertise right?"
        ) from error
