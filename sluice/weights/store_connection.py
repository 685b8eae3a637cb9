"""One member's connection, as the thread of the rendezvous store sees it: it never waits."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.weights.store_messages import MAX_FRAME_BYTES
from sluice.weights.store_seal import (
    FRAME_HEADER,
    MAC_BYTES,
    NONCE_BYTES,
    Conversation,
    FrameKind,
    signed_length,
)

_CHUNK_BYTES = 64 << 10
_HELLO_BYTES = NONCE_BYTES + MAC_BYTES


@dataclass(frozen=True, slots=True)
class RequestHandler:
    """Who is answered, and how: one epoch of the store.

    `answer` makes the body of an answer from that of a question and must not block; a
    ``ValueError`` ends the connection.
    """

    store_key: bytes = field(repr=False)
    answer: Callable[[bytes], bytes]


class StoreConnection:
    """The challenge, then a question that comes in or an answer that goes out; never both.

    Args:
        link: non-blocking; owned by the connection from here on.
        peer: its address, for the log.
    """

    def __init__(self, link: socket.socket, peer: str) -> None:
        self.link, self.peer = link, peer
        # Only a whole question counts: bytes that trickle in keep no connection open.
        self.answered_at = time.monotonic()
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._conversation: Conversation | None = None
        self._inbox = bytearray()
        self._outbox = memoryview(self._challenge)

    @property
    def is_proven(self) -> bool:
        """Whether the other side had the key."""
        return self._conversation is not None

    @property
    def wanted(self) -> int:
        """The selector's event that lets it go on."""
        return selectors.EVENT_WRITE if self._outbox else selectors.EVENT_READ

    def move(self, handler: RequestHandler) -> None:
        """Go on as far as possible without waiting.

        Raises:
            EOFError: the other side closed it.
            ValueError: it does not have the desk's key, or sent no frame of a question.
        """
        if not self._outbox:
            self._receive()
            if (conversation := self._proven(handler)) is None:
                return
            if (signed_frame := self._take_signed()) is None:
                return
            question = conversation.open(handler.store_key, FrameKind.QUESTION, signed_frame)
            answer = conversation.sign(
                handler.store_key, FrameKind.ANSWER, handler.answer(question)
            )
            self._outbox = memoryview(answer)
            self.answered_at = time.monotonic()
        self._outbox = self._outbox[self.link.send(self._outbox) :]

    def _receive(self) -> None:
        chunk = self.link.recv(_CHUNK_BYTES)
        if not chunk:
            if self._inbox:
                raise ValueError("it left in the middle of a message")
            raise EOFError
        self._inbox += chunk

    def _proven(self, handler: RequestHandler) -> Conversation | None:
        """The conversation, from the member's first bytes on."""
        if self._conversation is None and len(self._inbox) >= _HELLO_BYTES:
            hello = bytes(self._inbox[:_HELLO_BYTES])
            conversation = Conversation(self._challenge, hello[:NONCE_BYTES])
            conversation.check_proof(handler.store_key, hello[NONCE_BYTES:])
            del self._inbox[:_HELLO_BYTES]
            self._conversation = conversation
        return self._conversation

    def _take_signed(self) -> bytes | None:
        if len(self._inbox) < FRAME_HEADER.size:
            return None
        header = bytes(self._inbox[: FRAME_HEADER.size])
        end = FRAME_HEADER.size + signed_length(header, MAX_FRAME_BYTES)
        if len(self._inbox) < end:
            return None
        if len(self._inbox) > end:
            raise ValueError("a second question before the first was answered")
        signed_frame = bytes(self._inbox[FRAME_HEADER.size :])
        self._inbox.clear()
        return signed_frame
