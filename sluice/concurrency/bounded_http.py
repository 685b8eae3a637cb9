"""One HTTP POST with bounds on its time and on the size of the answer."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from sluice.errors import ConfigError

OK = 200
TOO_MANY_REQUESTS = 429
FIRST_SERVER_ERROR = 500
SHOWN_CHARACTERS = 200


class HttpFault(Exception):
    """No usable answer came.

    Args:
        detail: the answer that came instead, with the peer's address.
        temporary: whether the same request may succeed later.
    """

    def __init__(self, detail: str, *, temporary: bool) -> None:
        self.temporary = temporary
        super().__init__(detail)


class Endpoint(NamedTuple):
    """Where to post."""

    is_secure: bool
    host: str
    port: int | None
    path: str

    def __str__(self) -> str:
        """Return the endpoint as a URL."""
        port = "" if self.port is None else f":{self.port}"
        return f"http{'s' * self.is_secure}://{self.host}{port}{self.path}"


def endpoint(url: str, *, key: str) -> Endpoint:
    """Parse an ``http`` or ``https`` URL.

    Raises:
        ConfigError: the text is not such a URL; names `key`.
    """
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and not parts.query:
            return Endpoint(parts.scheme == "https", parts.hostname, parts.port, parts.path)
    raise ConfigError(f"{key} = {url!r} is no URL; write http://HOST:PORT/PATH")


def post_until(
    ends_at: float,
    to: Endpoint,
    body: bytes,
    headers: Mapping[str, str],
    *,
    attempts: int,
    first_pause_s: float,
    timeout_s: float,
    max_response_bytes: int,
) -> bytes:
    """Return the body of the answer, whose status was 200.

    After a temporary fault the request is repeated; the pauses double.

    Args:
        ends_at: of all attempts, by the monotonic clock.
        timeout_s: of one attempt in all, however slowly the peer sends.

    Raises:
        HttpFault: no connection, another status, too large an answer, or none in time.
    """
    attempt = 0
    while True:
        attempt += 1
        left_s = max(min(timeout_s, ends_at - time.monotonic()), 0.001)
        try:
            return _post(to, body, headers, left_s, max_response_bytes)
        except HttpFault as fault:
            pause_s = first_pause_s * 2 ** (attempt - 1)
            is_late = time.monotonic() + pause_s >= ends_at
            if attempt >= attempts or is_late or not fault.temporary:
                text = f"{fault} (attempt {attempt})"
                raise HttpFault(text, temporary=fault.temporary) from fault
            time.sleep(pause_s)


def _post(
    to: Endpoint, body: bytes, headers: Mapping[str, str], timeout_s: float, max_response_bytes: int
) -> bytes:
    kind = http.client.HTTPSConnection if to.is_secure else http.client.HTTPConnection
    connection = kind(to.host, to.port, timeout=timeout_s)
    ends_at = time.monotonic() + timeout_s
    try:
        connection.connect()
        with _shut_down_at(connection.sock, ends_at):
            connection.request("POST", to.path, body, dict(headers))
            response = connection.getresponse()
            answer = response.read(max_response_bytes + 1)
    except (OSError, http.client.HTTPException) as error:
        raise _no_answer_fault(to, error, timed_out=time.monotonic() >= ends_at) from error
    finally:
        connection.close()
    # A read that was cut off may look like an answer that ended early.
    if time.monotonic() >= ends_at:
        raise _no_answer_fault(to, TimeoutError(), timed_out=True)
    return _check_answer(to, response.status, answer, max_response_bytes)


def _check_answer(to: Endpoint, status: int, answer: bytes, max_response_bytes: int) -> bytes:
    if status != OK:
        excerpt = answer[: 4 * SHOWN_CHARACTERS].decode(errors="replace")[:SHOWN_CHARACTERS]
        temporary = status == TOO_MANY_REQUESTS or status >= FIRST_SERVER_ERROR
        raise HttpFault(f"{to}: status {status}: {excerpt}", temporary=temporary)
    if len(answer) > max_response_bytes:
        raise HttpFault(f"{to}: answer of more than {max_response_bytes} bytes", temporary=False)
    return answer


def _no_answer_fault(to: Endpoint, error: Exception, *, timed_out: bool) -> HttpFault:
    if timed_out or isinstance(error, TimeoutError):
        return HttpFault(f"{to}: no whole answer in time", temporary=True)
    return HttpFault(f"{to}: {type(error).__name__}: {error}"[:500], temporary=True)


@contextmanager
def _shut_down_at(connected: socket.socket, ends_at: float) -> Iterator[None]:
    """Shut the connection down at `ends_at`: a socket's own timeout is for one read only."""

    def shut_down() -> None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(ends_at - time.monotonic(), 0.0), shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
