"""The channels of one client, and its name for quotas."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from sluice.client.run_address import RunAddress
from sluice.errors import ConfigError, InvalidRequestError
from sluice.rpc.client import ChannelPool, Metadata
from sluice.rpc.metadata import CLIENT_KEY, MAX_NAME_LENGTH

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message


def default_client_name() -> str:
    """Return ``sluice-client@HOST:PID``. All unnamed clients of this process count as one.

    The name is printable ASCII, as gRPC requires, of at most `MAX_NAME_LENGTH` characters.
    """
    pid = str(os.getpid())
    host = "".join(
        character if "!" <= character <= "~" else "?" for character in socket.gethostname()
    )
    start = f"sluice-client@{host}"
    return f"{start[: MAX_NAME_LENGTH - len(pid) - 1]}:{pid}"


class ServiceChannels(ChannelPool):
    """The channels of one client: they send its name, and stay closed once they are closed.

    Args:
        address: credentials and limits of all channels.
        client_name: sent with each call, for quotas; empty: `default_client_name`.
    """

    def __init__(self, address: RunAddress, client_name: str) -> None:
        super().__init__(address.max_message_bytes, address.credentials, self._client_metadata)
        self._name = client_name or default_client_name()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def to(self, address: str) -> grpc.aio.Channel:
        """Return the channel to host:port.

        Raises:
            ConfigError: the channels are closed.
        """
        self.check_open()
        return super().to(address)

    def _client_metadata(self) -> Metadata:
        self.check_open()  # a retried call may find the channel closed
        return ((CLIENT_KEY, self._name),)

    def check_size(self, name: str, message: Message) -> None:
        """Refuse a message that gRPC would not send, and would report as the service's failure.

        Raises:
            InvalidRequestError: the message `name` is over the limit.
        """
        size, max_bytes = message.ByteSize(), self._max_message_bytes
        if size > max_bytes:
            raise InvalidRequestError(f"{name}: {size} bytes; send at most {max_bytes} at a time")

    def check_open(self) -> None:
        """Raise ConfigError once the channels are closed."""
        if self._closed:
            raise ConfigError("client: it is closed; open another one")

    async def close(self) -> None:
        """Close all channels, which cancels their calls, and open no other."""
        self._closed = True
        await super().close()
