"""A port kept for a server that starts later, so that a taken one is found at once."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from sluice.rpc.bound_socket import bound_socket


class PortReservation:
    """Holds host and port without listening: peers are refused as if nobody were there.

    Args:
        host: interface.
        port: 0 reserves nothing.

    Raises:
        ConfigError: the port is taken, or the interface does not exist.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = bound_socket(host, port) if port else None

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
        if self._socket is not None:
            self._socket.close()
