"""One thread that answers questions over TCP; no client can make it wait.

Consumes: frames of whoever has the key. Produces: one frame for each, in order, on the same
    connection.
Waits for: any socket to be ready.
Unblocked by: sockets, `close`, and a clock that ends silent connections.
On failure: a connection that breaks, proves no key, sends what is no question, or asks nothing for
    half a minute is closed; others are not touched.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from sluice.config.host_port import join_host_port
from sluice.weights.store_connection import RequestHandler, StoreConnection
from sluice.weights.store_seal import KEY_BYTES

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
_SILENT_S = 30.0
_NO_DESCRIPTOR_PAUSE_S = 0.05


class StoreServer:
    """Answers until it is closed; nobody before `serve`.

    Args:
        listener: bound and listening; owned by the server from here on.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._handler = RequestHandler(secrets.token_bytes(KEY_BYTES), bytes)
        listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections: dict[socket.socket, StoreConnection] = {}
        self._thread = threading.Thread(target=self._serve, name="weights-store", daemon=True)
        self._thread.start()

    def serve(self, store_key: bytes, answer: Callable[[bytes], bytes]) -> None:
        """Answer whoever has this key, from here on, and nobody else.

        Args:
            store_key: an empty one is known to all.
            answer: see `Desk`; only called in the server's thread.
        """
        self._handler = RequestHandler(store_key, answer)

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
            link, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it left again
            return
        except OSError as error:
            _log.warning("weights: the store could not accept a connection: %s", error)
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)  # else this would be tried again without end
            return
        if not self._has_capacity():
            link.close()
            return
        link.setblocking(False)
        connection = StoreConnection(link, join_host_port(*address[:2]))
        self._connections[link] = connection
        self._selector.register(link, connection.wanted)

    def _has_capacity(self) -> bool:
        """Whether one more fits; who has proven no key yet, and came first, makes room."""
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        unproven = next((c for c in self._connections.values() if not c.is_proven), None)
        if unproven is None:
            return False
        self._refuse(unproven, "it proved no key before the place was needed")
        return True

    def _advance(self, connection: StoreConnection) -> None:
        try:
            connection.move(self._handler)
        except BlockingIOError:
            pass
        except (OSError, EOFError):
            self._end(connection)
            return
        except ValueError as error:
            self._refuse(connection, str(error))
            return
        self._selector.modify(connection.link, connection.wanted)

    def _refuse(self, connection: StoreConnection, why: str) -> None:
        _log.warning("weights: the store ends the connection of %s: %s", connection.peer, why)
        self._end(connection)

    def _end(self, connection: StoreConnection) -> None:
        del self._connections[connection.link]
        self._selector.unregister(connection.link)
        connection.link.close()

    def _end_silent(self) -> None:
        oldest = time.monotonic() - _SILENT_S
        for connection in [c for c in self._connections.values() if c.answered_at < oldest]:
            if connection.is_proven:
                self._end(connection)
            else:
                self._refuse(connection, f"it proved no key within {_SILENT_S:g} s")

    def _shut(self) -> None:
        for connection in list(self._connections.values()):
            self._end(connection)
        self._selector.close()
        for owned in (self._listener, self._woken):
            with contextlib.suppress(OSError):
                owned.close()
