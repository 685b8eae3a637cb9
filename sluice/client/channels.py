"""The name of a client that was given none: quotas bind it as well."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sluice.client.run_address import RunAddress
from sluice.errors import ConfigError, InvalidRequestError
from sluice.rpc.client import open_channel
from sluice.rpc.metadata import CLIENT_KEY, MAX_NAME_LENGTH, TRACEPARENT

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message


def default_client_name() -> str:
    """``sluice-client@HOST:PID`` of this process, all of whose unnamed clients count as one.

    Printable ASCII, as gRPC wants metadata, of at most `MAX_NAME_LENGTH` characters.
    """
    pid = str(os.getpid())
    host = "".join(each if "!" <= each <= "~" else "?" for each in socket.gethostname())
    start = f"sluice-client@{host}"
    return f"{start[: MAX_NAME_LENGTH - len(pid) - 1]}:{pid}"


MethodT = TypeVar("MethodT", bound=Callable[..., object])


class ServiceChannels:
    """One channel an address, opened when it is first used.

    Args:
        address: credentials and limits of all of them.
        client_name: told with each call, for quotas; empty: `default_client_name`.
    """

    def __init__(self, address: RunAddress, client_name: str) -> None:
        self._address = address
        self._metadata = ((CLIENT_KEY, client_name or default_client_name()),)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port.

        Raises:
            ConfigError: they are closed.
        """
        self.check_open()
        if address not in self._channels:
            self._channels[address] = open_channel(
                address,
                max_message_bytes=self._address.max_message_bytes,
                credentials=self._address.credentials,
            )
        return self._channels[address]

    def named(self, method: MethodT, traceparent: str = "") -> MethodT:
        """A stub's method that tells the client's name, and the caller's span if it has one.

        Calling it raises ConfigError once the channels are closed.
        """
        of_trace = ((TRACEPARENT, traceparent),) if traceparent else ()

        def call(*arguments: object, **options: object) -> object:
            self.check_open()  # a call that is tried again may find them closed
            return method(*arguments, metadata=(*self._metadata, *of_trace), **options)

        return call  # type: ignore[return-value]

    def check_size(self, name: str, message: Message) -> None:
        """Refuses what gRPC would not send, and would call a failure of the service.

        Raises:
            InvalidRequestError: the message is over the limit; `name` says what it is.
        """
        size, most = message.ByteSize(), self._address.max_message_bytes
        if size > most:
            raise InvalidRequestError(f"{name}: {size} bytes; send at most {most} at a time")

    def check_open(self) -> None:
        """Raises ConfigError once they are closed."""
        if self._closed:
            raise ConfigError("client: it is closed; open another one")

    async def close(self) -> None:
        """Closes all of them, which cancels their calls, and opens no other."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()
