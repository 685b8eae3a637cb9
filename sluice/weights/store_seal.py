"""Who may talk to the rendezvous store: whoever has the key of its epoch.

The sender draws a key for each epoch, and a member gets it in ``JoinGroup``. Neither side reads
anything of a message before its MAC is proven. One connection:

1. The store sends a challenge, 16 random bytes.
2. The member sends 16 random bytes of its own and a proof, the MAC of an empty body. Of both
   sides' bytes and the epoch's key the two derive the key of the connection:
   HMAC-SHA256(store key, challenge + nonce).
3. The member asks and the store answers, in turns. Each message is a frame: a 4-byte little-endian
   length of what follows, the MAC (32 bytes), the body.

A MAC is HMAC-SHA256(connection key, what it is for (1 byte) + number of the exchange (8 bytes,
little-endian, from 0) + body). So a message counts once, in its place, in its direction and in
its connection: a recording is worth nothing to either side, for each gave random bytes. The bodies
are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import Enum

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
