"""Answers ``GET /metrics`` from a thread of its own, so that it answers while others are stuck.

Consumes: requests without a body. Waits for: the whole of a request, and for each part of its
answer to be taken, `_REQUEST_TIMEOUT_S` at most. Unblocked by: bytes, that time, the caller's end.
Produces: a page. On failure of the page: 500, and the reason in the log. Requests above
`_MOST_AT_ONCE` find a closed connection. On shutdown: `stop` ends the thread; requests under way
are cut off with the process.
"""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sluice.telemetry.own_cost import TELEMETRY_CPU, Part

__all__ = ["PATH", "MetricsServer"]

logger = logging.getLogger(__name__)

PATH = "/metrics"
_REQUEST_TIMEOUT_S = 5.0
_MOST_AT_ONCE = 8
_POLL_S = 0.2
_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """One listening server.

    Args:
        page: makes the answer; called in any thread.
        content_type: of the page.
        listening: a bound TCP socket, which the server closes.
    """

    def __init__(
        self, page: Callable[[], bytes], content_type: str, listening: socket.socket
    ) -> None:
        self._server = _Server(page, content_type, listening)
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(_POLL_S), name="metrics", daemon=True
        )
        self.port: int = listening.getsockname()[1]

    def start(self) -> None:
        """Serves from here on."""
        self._server.server_activate()
        self._thread.start()

    def stop(self) -> None:
        """Listens no more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, page: Callable[[], bytes], content_type: str, listening: socket.socket
    ) -> None:
        super().__init__(("", 0), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.page, self.content_type = page, content_type
        self._capacity = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  as its base
        if not self._capacity.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started, which would have given the room back
            self._capacity.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  as its base
        try:
            with TELEMETRY_CPU.charged(Part.SCRAPES):
                super().process_request_thread(request, client_address)
        finally:
            self._capacity.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  as its base
        logger.debug("a scrape broke off", exc_info=True)  # noqa: LOG014  called in a handler


class _UntilDeadline(io.RawIOBase):
    """Reads of a socket that end at one time together, however few bytes each brings."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  as its base
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not come in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Request(BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT_S
    server_version, sys_version = "sluice", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        deadline_s = time.monotonic() + self.timeout
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, deadline_s))

    def do_GET(self) -> None:
        """Answers a scrape."""
        server = self.server
        assert isinstance(server, _Server)
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, f"only {PATH} is here\n".encode())
            return
        try:
            page = server.page()
        except Exception:  # the boundary where errors become statuses
            logger.exception("the metrics could not be read")
            reported = b"the metrics could not be read; see the log\n"
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, reported)
            return
        self._answer(HTTPStatus.OK, server.content_type, page)

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.connection.settimeout(self.timeout)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401  as its base
        """A scrape every few seconds is no news."""
