"""Who could reach a server, and what that means with the credentials it has."""

from __future__ import annotations

import ipaddress
import socket

from sluice.config.host_port import bare_host
from sluice.rpc.credentials import Credentials


def exposure(host: str, credentials: Credentials) -> str | None:
    """What to warn of when a server listens on `host`; none if there is nothing."""
    if is_loopback(host):
        return None
    if not credentials.identify_callers:
        return (
            "other machines may reach this port, and whoever does can steer the run and read its "
            "data; set sluice.security.tls=mtls or sluice.security.token_file (`sluice certs` "
            "makes the files), or keep the network private"
        )
    if not credentials.is_encrypted:
        return (
            "other machines may reach this port, and tokens and data travel unencrypted; set "
            "sluice.security.tls=mtls, or keep the network private"
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether every address that `host` stands for is of this machine alone."""
    try:
        found = socket.getaddrinfo(bare_host(host), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    # A link-local address carries its interface after a percent sign.
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
