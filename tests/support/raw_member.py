"""A member's connection to the rendezvous store, byte by byte, for tests that misuse it."""

from __future__ import annotations

import socket
from typing import Self

from sluice.weights.store import FRAME_HEADER, NONCE_BYTES, Conversation, FrameKind

WAIT_S = 10.0
KEY = bytes(range(32))
NONCE = b"n" * NONCE_BYTES


class RawMember:
    """Connected, with the challenge read; nothing is said yet.

    Args:
        key: what its messages are sealed with.
        early: said before the challenge is read.
    """

    def __init__(self, port: int, key: bytes = KEY, early: bytes = b"") -> None:
        self.link = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self.link.sendall(early)
        self.key = key
        self.conversation = Conversation(self.read(NONCE_BYTES), NONCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    @property
    def hello(self) -> bytes:
        """What proves the key."""
        return NONCE + self.conversation.proof(self.key)

    def signed_frame(self, body: bytes) -> bytes:
        """The frame of a question."""
        return self.conversation.sign(self.key, FrameKind.QUESTION, body)

    def open(self, signed_frame: bytes) -> bytes:
        """The body of an answer; ends the exchange."""
        return self.conversation.open(self.key, FrameKind.ANSWER, signed_frame)

    def greet(self) -> Self:
        """Prove the key."""
        self.link.sendall(self.hello)
        return self

    def ask(self, body: bytes) -> bytes:
        """One exchange; the answer's body."""
        self.link.sendall(self.signed_frame(body))
        return self.open(self.read_frame())

    def read_frame(self) -> bytes:
        """A frame without its header."""
        header = self.read(FRAME_HEADER.size)
        return self.read(FRAME_HEADER.unpack(header)[0])

    def read(self, num_bytes: int) -> bytes:
        """So many bytes, or those that came before the end."""
        received = b""
        while len(received) < num_bytes and (chunk := self.link.recv(num_bytes - len(received))):
            received += chunk
        return received

    def is_ended(self) -> bool:
        """Whether the store closes it without another byte; fails by a timeout if it does not."""
        try:
            return self.link.recv(1) == b""
        except ConnectionError:
            return True
