"""One thread that answers questions over TCP; no client can make it wait.

Consumes: frames. Produces: one frame for each, in order, on the same connection.
Waits for: any socket to be ready.
Unblocked by: sockets, `close`, and a clock that ends silent connections.
On failure: a connection that breaks, sends what is no question, or asks nothing for half a minute
    is closed; others are not touched.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from sluice.weights.store_messages import FRAME_HEADER, body_length

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
_SILENT_S = 30.0
_NO_DESCRIPTOR_PAUSE_S = 0.05
_CHUNK_BYTES = 64 << 10


class StoreServer:
    """Answers until it is closed.

    Args:
        listener: bound and listening; owned by the server from here on.
        answer: from the body of a question to the frame of its answer; must not block. A
            ``ValueError`` ends the connection.
    """

    def __init__(self, listener: socket.socket, answer: Callable[[bytes], bytes]) -> None:
        self._listener, self._answer = listener, answer
        listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections: dict[socket.socket, _Connection] = {}
        self._thread = threading.Thread(target=self._serve, name="weights-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end all connections. Soon, and once: repeating it is harmless."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                ready = {key.fileobj for key, _ in self._selector.select(_SILENT_S / 4)}
                if self._woken in ready:
                    return
                for connection in list(self._connections.values()):
                    if connection.link in ready:
                        self._advance(connection)
                self._end_silent()
                # Last, so that whoever left has made room.
                if self._listener in ready:
                    self._accept()
        finally:
            self._shut()

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it left again
            return
        except OSError as error:
            _log.warning("weights: the store could not accept a connection: %s", error)
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)  # else this would be tried again without end
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            link.close()
            return
        link.setblocking(False)
        self._connections[link] = _Connection(link)
        self._selector.register(link, selectors.EVENT_READ)

    def _advance(self, connection: _Connection) -> None:
        try:
            connection.move(self._answer)
        except BlockingIOError:
            pass
        except (OSError, EOFError):
            self._end(connection)
            return
        except ValueError as error:
            _log.warning("weights: the store ends a connection: %s", error)
            self._end(connection)
            return
        self._selector.modify(connection.link, connection.wanted)

    def _end(self, connection: _Connection) -> None:
        del self._connections[connection.link]
        self._selector.unregister(connection.link)
        connection.link.close()

    def _end_silent(self) -> None:
        oldest = time.monotonic() - _SILENT_S
        for connection in [c for c in self._connections.values() if c.answered_at < oldest]:
            self._end(connection)

    def _shut(self) -> None:
        for connection in list(self._connections.values()):
            self._end(connection)
        self._selector.close()
        for owned in (self._listener, self._woken):
            with contextlib.suppress(OSError):
                owned.close()


class _Connection:
    """A question that comes in, or an answer that goes out; never both."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        # Only a whole question counts: bytes that trickle in keep no connection open.
        self.answered_at = time.monotonic()
        self._inbox = bytearray()
        self._outbox = memoryview(b"")

    @property
    def wanted(self) -> int:
        """The selector's event that lets it go on."""
        return selectors.EVENT_WRITE if self._outbox else selectors.EVENT_READ

    def move(self, answer: Callable[[bytes], bytes]) -> None:
        """Go on as far as possible without waiting.

        Raises:
            EOFError: the other side closed it.
            ValueError: it sent no frame of a question.
        """
        if not self._outbox:
            chunk = self.link.recv(_CHUNK_BYTES)
            if not chunk:
                raise EOFError
            self._inbox += chunk
            if (body := self._take_body()) is None:
                return
            self._outbox = memoryview(answer(body))
            self.answered_at = time.monotonic()
        self._outbox = self._outbox[self.link.send(self._outbox) :]

    def _take_body(self) -> bytes | None:
        if len(self._inbox) < FRAME_HEADER.size:
            return None
        end = FRAME_HEADER.size + body_length(bytes(self._inbox[: FRAME_HEADER.size]))
        if len(self._inbox) < end:
            return None
        if len(self._inbox) > end:
            raise ValueError("a second question before the first was answered")
        body = bytes(self._inbox[FRAME_HEADER.size :])
        self._inbox.clear()
        return body
