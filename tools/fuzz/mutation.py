"""Valid messages made wrong: field by field, or byte by byte."""

# ruff: noqa: ANN401
from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.struct_pb2 import Struct

from tools.fuzz.nasty_values import nasty_scalar, nasty_text

if TYPE_CHECKING:
    from google.protobuf.message import Message

_REPEATS = (0, 1, 2, 2, 3, 65, 300, 5000)
_DESCENTS = 6


def mutated(message: Message, rng: random.Random) -> Message:
    """Return a copy with one to three fields, at any depth, replaced by nasty values."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(rng.randint(1, 3)):
        _mutate(changed, rng, _DESCENTS)
    return changed


def corrupted(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with some flipped, cut off, doubled or inserted."""
    wrong = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(wrong) + 1)
        match rng.randrange(4):
            case 0 if position < len(wrong):
                wrong[position] ^= 1 << rng.randrange(8)
            case 1:
                del wrong[position:]
            case 2:
                wrong[position:position] = rng.randbytes(rng.randint(1, 16))
            case _:
                wrong += wrong[position:]
    return bytes(wrong)


def random_bytes(rng: random.Random) -> bytes:
    """Return no message at all, as a rule."""
    return rng.randbytes(rng.choice((0, 1, 2, 5, 17, 100, 1000, 20_000)))


def _mutate(message: Any, rng: random.Random, descents: int) -> None:
    if isinstance(message, Struct):
        message.Clear()
        _fill(message, rng)
        return
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _mutate_map(message, field, rng)
    elif field.label == FieldDescriptor.LABEL_REPEATED:
        _mutate_repeated(message, field, rng, descents)
    elif field.message_type is not None:
        _mutate(getattr(message, field.name), rng, descents - 1)
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, nasty_scalar(field, rng))


def _mutate_map(message: Any, field: FieldDescriptor, rng: random.Random) -> None:
    entry = field.message_type
    value = entry.fields_by_name["value"] if entry is not None else None
    if value is not None and value.message_type is None:
        for _ in range(rng.choice((1, 3, 200))):
            getattr(message, field.name)[f"{nasty_text(rng)[:40]}{rng.random()}"] = nasty_scalar(
                value, rng
            )


def _mutate_repeated(message: Any, field: FieldDescriptor, rng: random.Random, deep: int) -> None:
    values = getattr(message, field.name)
    if field.message_type is None:
        sampled = nasty_scalar(field, rng)
        values.extend([sampled] * rng.choice(_REPEATS))
        values.append(nasty_scalar(field, rng))
    elif values and deep > 0 and rng.random() < 0.7:
        _mutate(values[rng.randrange(len(values))], rng, deep - 1)
    else:
        for _ in range(rng.choice(_REPEATS)):
            values.add()


def _fill(struct: Struct, rng: random.Random) -> None:
    """Fill further information of a prompt: flat, wide or deep."""
    match rng.randrange(4):
        case 0:
            inner: Any = struct
            for _ in range(rng.choice((2, 10, 30, 45))):
                inner = inner.get_or_create_struct("a")
        case 1:
            struct.update({f"k{i}": nasty_text(rng)[:100] for i in range(rng.choice((3, 500)))})
        case 2:
            struct.update({"n": [1e308, float("nan"), -float("inf"), None, True, {"x": []}]})
        case _:
            struct.update({nasty_text(rng): nasty_text(rng)})
