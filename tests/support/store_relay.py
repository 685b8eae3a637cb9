"""Somebody between a member and the rendezvous store, who hears everything and may change it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Self

Change = Callable[[bytes], bytes]
WAIT_S = 10.0


class StoreRelay:
    """Relays one connection after another; `said` and `answered` are what passed, unchanged.

    Args:
        port: the store's.
        change_question: applied to each chunk on its way to the store.
        change_answer: applied to each chunk on its way back, but for the challenge.
    """

    def __init__(
        self,
        port: int,
        change_question: Change = bytes,
        change_answer: Change = bytes,
    ) -> None:
        self._store_port = port
        self._changes = change_question, change_answer
        self.said, self.answered = b"", b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._relay_all, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)

    def _relay_all(self) -> None:
        with suppress(OSError):
            while True:
                member, _ = self._listener.accept()
                self._relay(member)

    def _relay(self, member: socket.socket) -> None:
        with ExitStack() as stack, suppress(OSError):
            stack.enter_context(member)
            store = stack.enter_context(socket.create_connection(("127.0.0.1", self._store_port)))
            for link in (member, store):
                link.settimeout(WAIT_S)
            challenge = store.recv(16, socket.MSG_WAITALL)
            member.sendall(challenge)
            if question := member.recv(1 << 16):
                store.sendall(self._changes[0](question))
                answer = store.recv(1 << 16)
                member.sendall(self._changes[1](answer))
                self.said, self.answered = question, challenge + answer
