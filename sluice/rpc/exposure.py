"""Who could reach a server, and what that means with the credentials it has."""

from __future__ import annotations

from sluice.config.host_port import is_loopback
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
