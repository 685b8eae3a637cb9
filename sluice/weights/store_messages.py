"""What the members of a group and the rendezvous store say to each other.

One question and one answer per connection at a time, each the msgpack body of a sealed frame
(`sluice.weights.store_seal`). Bounds are part of the types; whoever breaks one is refused, whatever
sent it.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

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


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One action on the keys of one epoch."""

    epoch: Annotated[int, Meta(ge=0)]
    action: Action


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the action gave; `refusal` says why nothing was done."""

    values: tuple[bytes | None, ...] = ()
    refusal: str | None = None


_MessageT = TypeVar("_MessageT", Question, Answer)


def to_body(message: Question | Answer) -> bytes:
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
