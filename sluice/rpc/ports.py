"""Bind a socket to an interface and a port, or explain why that fails. Loads no gRPC."""

from __future__ import annotations

import errno
import os
import socket

from sluice.config.addresses import split_host_port
from sluice.errors import ConfigError


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket that does not listen. The caller closes it.

    Args:
        port: 0 lets the system choose.

    Raises:
        ConfigError: the port is taken or the interface does not exist.
    """
    try:
        infos = socket.getaddrinfo(split_host_port(host)[0], port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _bind_error(host, port, error) from error
    # A name may stand for addresses of both families, and the machine may lack one family.
    failure = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, kind, protocol, _, address in infos:
        try:
            return _bind(socket.socket(family, kind, protocol), address)
        except OSError as error:
            failure = error
            if error.errno == errno.EADDRINUSE:
                break
    raise _bind_error(host, port, failure) from failure


def check_bindable(host: str, port: int) -> None:
    """Raise ConfigError with the reason if a server cannot listen there."""
    bind_socket(host, port).close()


def port_in_use(host: str, port: int) -> ConfigError:
    """Return the error for a port that another process holds."""
    return ConfigError(
        f"port {port} on {host} is in use; end the process that holds it, or set another port "
        "(0 lets the system choose)"
    )


def _bind(unbound: socket.socket, address: tuple[object, ...]) -> socket.socket:
    try:
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unbound.bind(address)
    except OSError:
        unbound.close()
        raise
    return unbound


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return port_in_use(host, port)
    return ConfigError(
        f"host {host}, port {port}: cannot listen there ({error.strerror}); "
        "use an address of this machine"
    )
