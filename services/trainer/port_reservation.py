"""A port kept for a server that starts later, so that a taken one is found at once."""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Self

from sluice.errors import ConfigError


class PortReservation:
    """Holds host and port without listening: peers are refused as if nobody were there.

    Args:
        host: interface.
        port: 0 reserves nothing.

    Raises:
        ConfigError: the port is taken, or the interface does not exist.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if port:
                self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise _refused(host, port, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Frees the port for the server itself. Repeating it does nothing."""
        self._socket.close()


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use; end the process that holds it, or set another port "
            "(0 lets the system choose)"
        )
    return ConfigError(
        f"host {host}, port {port}: cannot listen there ({error.strerror}); "
        "use an address of this machine"
    )
