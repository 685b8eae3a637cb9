"""The address by which a peer reaches this host."""

from __future__ import annotations

import socket
import time

from sluice.errors import ConfigError

_ANY_PORT = 9  # nothing is sent
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0


def own_address_within(peer_host: str, seconds: float) -> str:
    """Return `own_address`; wait for a peer whose name is unknown while its container is away.

    Raises:
        ConfigError: it was still unknown after so many seconds.
    """
    deadline_s, pause_s = time.monotonic() + seconds, _FIRST_PAUSE_S
    while True:
        try:
            return own_address(peer_host)
        except ConfigError:
            if time.monotonic() + pause_s > deadline_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def own_address(peer_host: str) -> str:
    """Return this host's address on the network that leads to `peer_host`; send no packet.

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
