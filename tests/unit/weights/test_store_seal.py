"""What a MAC binds: key, connection, direction, place and body."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.weights.store import FRAME_HEADER, KEY_BYTES, MAC_BYTES, Conversation, FrameKind
from sluice.weights.store import signed_length as length_of

_KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
_NONCES = st.binary(min_size=16, max_size=16)
_BODIES = st.binary(max_size=50)


def _content(frame: bytes) -> bytes:
    return frame[FRAME_HEADER.size :]


def test_a_frame_is_length_mac_and_body_by_the_documented_formula() -> None:
    key, challenge, nonce = b"k" * 32, b"c" * 16, b"n" * 16
    conversation = Conversation(challenge, nonce)
    connection_key = hmac.new(key, challenge + nonce, hashlib.sha256).digest()

    def mac(message: bytes) -> bytes:
        return hmac.new(connection_key, message, hashlib.sha256).digest()

    zero, one = bytes(8), b"\x01" + bytes(7)
    assert conversation.proof(key) == mac(b"p" + zero)
    frames = [
        conversation.sign(key, what, b"body") for what in (FrameKind.QUESTION, FrameKind.ANSWER) * 2
    ]
    signed = [b"q" + zero, b"a" + zero, b"q" + one, b"a" + one]
    assert frames == [b"\x24\0\0\0" + mac(start + b"body") + b"body" for start in signed]


@given(_KEYS, _NONCES, _NONCES, st.lists(st.tuples(_BODIES, _BODIES), max_size=3))
def test_two_ends_with_the_same_key_understand_each_other(
    key: bytes, challenge: bytes, nonce: bytes, exchanges: list[tuple[bytes, bytes]]
) -> None:
    member, store = Conversation(challenge, nonce), Conversation(challenge, nonce)
    store.check_proof(key, member.proof(key))
    for question, answer in exchanges:
        asked = _content(member.sign(key, FrameKind.QUESTION, question))
        assert store.open(key, FrameKind.QUESTION, asked) == question
        answered = _content(store.sign(key, FrameKind.ANSWER, answer))
        assert member.open(key, FrameKind.ANSWER, answered) == answer


@given(_BODIES, st.data())
def test_a_frame_with_any_bit_changed_is_refused(body: bytes, data: st.DataObject) -> None:
    talk = Conversation(b"c" * 16, b"n" * 16)
    signed_frame = bytearray(_content(talk.sign(b"k" * 32, FrameKind.QUESTION, body)))
    bit = data.draw(st.integers(0, 8 * len(signed_frame) - 1))
    signed_frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="question 0 is forged, damaged or a repetition"):
        talk.open(b"k" * 32, FrameKind.QUESTION, bytes(signed_frame))


@pytest.mark.parametrize("changed", ["key", "challenge", "nonce", "direction", "place", "cut"])
def test_a_frame_counts_only_where_it_was_sealed_for(changed: str) -> None:
    key, challenge, nonce = b"k" * 32, b"c" * 16, b"n" * 16
    signed_frame = _content(Conversation(challenge, nonce).sign(key, FrameKind.QUESTION, b"body"))
    talk = Conversation(
        b"x" * 16 if changed == "challenge" else challenge,
        b"x" * 16 if changed == "nonce" else nonce,
    )
    if changed == "place":
        talk.sign(key, FrameKind.ANSWER, b"")
    with pytest.raises(ValueError, match="forged, damaged or a repetition"):
        talk.open(
            b"x" * 32 if changed == "key" else key,
            FrameKind.ANSWER if changed == "direction" else FrameKind.QUESTION,
            signed_frame[: MAC_BYTES - 1] if changed == "cut" else signed_frame,
        )


@given(st.integers(0, 2**32 - 1))
def test_a_length_is_taken_if_it_holds_a_mac_and_no_more_than_the_longest_body(length: int) -> None:
    header = FRAME_HEADER.pack(length)
    if MAC_BYTES <= length <= MAC_BYTES + 100:
        assert length_of(header, 100) == length
    else:
        with pytest.raises(ValueError, match=f"a frame of {length} bytes"):
            length_of(header, 100)
