"""Requests that are no message: refused as what they are, an error of the caller.

gRPC answers a failed decoder with UNKNOWN and logs a traceback, as if the service were broken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from sluice.errors import InvalidRequestError

__all__ = ["MalformedRequest", "checked", "checked_stream", "lenient"]

Decoder = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class MalformedRequest:
    """Stands for bytes that are no message."""

    num_bytes: int
    reason: str


def lenient(decode: Decoder | None) -> Decoder | None:
    """A decoder that gives a `MalformedRequest` for bytes that `decode` refuses."""
    if decode is None:
        return None

    def decoded(data: bytes) -> Any:  # noqa: ANN401  any message
        try:
            return decode(data)
        except (DecodeError, ValueError, RecursionError) as error:
            return MalformedRequest(len(data), str(error)[:200])

    return decoded


def checked(request: Any) -> Any:  # noqa: ANN401
    """The message itself. Raises InvalidRequestError if there is none."""
    if isinstance(request, MalformedRequest):
        raise InvalidRequestError(
            f"request: its {request.num_bytes} bytes are no message of this method "
            f"({request.reason}); use the protocol files of the service's version"
        )
    return request


async def checked_stream(requests: Any) -> AsyncIterator[Any]:  # noqa: ANN401
    """The messages one by one, as `checked`."""
    async for message in requests:
        yield checked(message)
