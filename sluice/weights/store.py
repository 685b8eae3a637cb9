"""The server of the rendezvous store: its messages, their authentication, its keys and its
thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from sluice.config.addresses import join_host_port

MAX_FRAME_BYTES = 1 << 20
MAX_VALUE_BYTES = 256 << 10
MAX_KEY_CHARS = 256
MAX_KEYS_ASKED = 4096

Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_CHARS)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]


class Write(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Sets a key. Answered by no values."""

    key: Key
    value: Value


class Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Asks for keys. Answered by one value per key, ``None`` where there is none."""

    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS_ASKED)]


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Adds to a number in decimal digits, missing is 0. Answered by the sum."""

    key: Key
    amount: Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class Replace(msgspec.Struct, frozen=True, array_like=True, tag="replace"):
    """Sets a key if it holds `expected` (or is missing and `expected` is empty).

    Answered by what it holds then; by `expected` if it is missing all the same.
    """

    key: Key
    expected: Value
    desired: Value


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Removes a key. Answered by the value it had, ``None`` if it was missing."""

    key: Key


Action = Write | Read | Add | Replace | Delete


class StoreQuestion(msgspec.Struct, frozen=True, array_like=True):
    """One action on the keys of one epoch."""

    epoch: Annotated[int, Meta(ge=0)]
    action: Action


class StoreAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What the action gave; `refusal` says why nothing was done."""

    values: tuple[bytes | None, ...] = ()
    refusal: str | None = None


_MessageT = TypeVar("_MessageT", StoreQuestion, StoreAnswer)


def to_body(message: StoreQuestion | StoreAnswer) -> bytes:
    """The body of a frame.

    Raises:
        ValueError: it would be longer than `MAX_FRAME_BYTES`.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} may travel")
    return body


def from_body(body: bytes, kind: type[_MessageT]) -> _MessageT:
    """Read a frame's body.

    Raises:
        ValueError: these bytes are no such message, or break one of its bounds.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no {kind.__name__.lower()}: {error}") from error


# Who may talk to the rendezvous store: whoever has the key of its epoch.
#
# The sender draws a key for each epoch, and a member gets it in ``JoinGroup``. Neither side
# reads anything of a message before its MAC is proven. One connection:
#
# 1. The store sends a challenge, 16 random bytes.
# 2. The member sends 16 random bytes of its own and a proof, the MAC of an empty body. Of both
#    sides' bytes and the epoch's key the two derive the key of the connection:
#    HMAC-SHA256(store key, challenge + nonce).
# 3. The member asks and the store answers, in turns. Each message is a frame: a 4-byte
# little-endian
#    length of what follows, the MAC (32 bytes), the body.
#
# A MAC is HMAC-SHA256(connection key, what it is for (1 byte) + number of the exchange (8 bytes,
# little-endian, from 0) + body). So a message counts once, in its place, in its direction and in
# its connection: a recording is worth nothing to either side, for each gave random bytes. The
# bodies are not encrypted.

FRAME_HEADER = struct.Struct("<I")
KEY_BYTES = 32
NONCE_BYTES = 16
MAC_BYTES = hashlib.sha256().digest_size
_EXCHANGE = struct.Struct("<Q")


class FrameKind(Enum):
    """What a MAC is for, as the byte that goes into it."""

    PROOF = b"p"
    QUESTION = b"q"
    ANSWER = b"a"


class Conversation:
    """One end of one connection. An answer, given or taken, ends an exchange.

    Each method takes the key of the epoch, so that a connection does not outlive its epoch.

    Args:
        challenge: the store's random bytes.
        nonce: the member's.
    """

    def __init__(self, challenge: bytes, nonce: bytes) -> None:
        self._salt = challenge + nonce
        self._num_exchanges = 0

    def proof(self, store_key: bytes) -> bytes:
        """What a member says of itself before it may ask."""
        return self._mac(store_key, FrameKind.PROOF, b"")

    def check_proof(self, store_key: bytes, proof: bytes) -> None:
        """Refuse a member that does not have the key, by ValueError."""
        if not hmac.compare_digest(proof, self.proof(store_key)):
            raise ValueError("it does not have the key of the epoch")

    def sign(self, store_key: bytes, what: FrameKind, body: bytes) -> bytes:
        """The frame of the next message."""
        mac = self._mac(store_key, what, body)
        self._count(what)
        return FRAME_HEADER.pack(MAC_BYTES + len(body)) + mac + body

    def open(self, store_key: bytes, what: FrameKind, signed_frame: bytes) -> bytes:
        """The body of the next message.

        Args:
            sealed: a frame without its header.

        Raises:
            ValueError: it is not this message, or not of somebody who has the key.
        """
        mac, body = signed_frame[:MAC_BYTES], signed_frame[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(store_key, what, body)):
            raise ValueError(
                f"{what.name.lower()} {self._num_exchanges} is forged, damaged or a repetition"
            )
        self._count(what)
        return body

    def _mac(self, store_key: bytes, what: FrameKind, body: bytes) -> bytes:
        key = hmac.digest(store_key, self._salt, hashlib.sha256)
        message = what.value + _EXCHANGE.pack(self._num_exchanges) + body
        return hmac.digest(key, message, hashlib.sha256)

    def _count(self, what: FrameKind) -> None:
        self._num_exchanges += what is FrameKind.ANSWER


def signed_length(header: bytes, max_body_bytes: int) -> int:
    """How much follows a frame's header, before any of it is read.

    Raises:
        ValueError: too little for a MAC, or more than a MAC and `max_body_bytes`.
    """
    length: int = FRAME_HEADER.unpack(header)[0]
    if not MAC_BYTES <= length <= MAC_BYTES + max_body_bytes:
        raise ValueError(
            f"a frame of {length} bytes; a MAC of {MAC_BYTES} and a body of at most "
            f"{max_body_bytes} may travel"
        )
    return length


MAX_KEYS = 16384
MAX_TABLE_BYTES = 64 << 20


class KeyTable:
    """Keys and values of the newest epoch; those of earlier ones are gone.

    Pure memory, for one thread. Nothing here waits: who waits for a key asks again.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0

    def begin(self, epoch: int) -> None:
        """Forget everything, and answer questions of this epoch only."""
        self._epoch, self._values, self._num_bytes = epoch, {}, 0

    def answer(self, question: StoreQuestion) -> StoreAnswer:
        """Do what is asked, or say why not: another epoch, a full table, no number to add to."""
        if question.epoch != self._epoch:
            current = "none has begun" if self._epoch is None else f"the store is at {self._epoch}"
            return StoreAnswer(refusal=f"epoch {question.epoch} is not open: {current}")
        try:
            return StoreAnswer(self._apply(question.action))
        except ValueError as error:
            return StoreAnswer(refusal=str(error))

    def _apply(self, action: Action) -> tuple[bytes | None, ...]:
        match action:
            case Write(key, value):
                self._put(key, value)
                return ()
            case Read(keys):
                return tuple(self._values.get(key) for key in keys)
            case Add(key, amount):
                return (self._put(key, str(_number(self._values.get(key)) + amount).encode()),)
            case Replace(key, expected, desired):
                held = self._values.get(key)
                if (held or b"") == expected and (held is not None or not expected):
                    return (self._put(key, desired),)
                return (expected if held is None else held,)
            case Delete(key):
                held = self._values.pop(key, None)
                self._num_bytes -= 0 if held is None else len(key) + len(held)
                return (held,)

    def _put(self, key: str, value: bytes) -> bytes:
        held = self._values.get(key)
        growth = len(value) - len(held) if held is not None else len(key) + len(value)
        num_keys = len(self._values) + (held is None)
        if num_keys > MAX_KEYS or self._num_bytes + growth > MAX_TABLE_BYTES:
            raise ValueError(
                f"the store is full: {num_keys} keys, {self._num_bytes + growth} bytes with "
                f"this one; at most {MAX_KEYS} keys and {MAX_TABLE_BYTES} bytes fit"
            )
        self._values[key] = value
        self._num_bytes += growth
        return value


def _number(value: bytes | None) -> int:
    if value is None:
        return 0
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"{value[:20]!r} is no number to add to") from error


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


# One thread that answers questions over TCP; no client can make it wait.
#
# Consumes: frames of whoever has the key. Produces: one frame for each, in order, on the same
#     connection.
# Waits for: any socket to be ready.
# Unblocked by: sockets, `close`, and a clock that ends silent connections.
# On failure: a connection that breaks, proves no key, sends what is no question, or asks nothing
# for
#     half a minute is closed; others are not touched.

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
