"""Messages of every request type: plausible ones, made from the descriptors, and wrong ones.

Wrong messages are plausible ones with some fields replaced, or with some bytes changed.
"""
# ruff: noqa: ANN401 - messages and fields of any type

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.struct_pb2 import Struct

from tests.support.image_files import png
from tools.fuzz.nasty_values import nasty_scalar, nasty_text

if TYPE_CHECKING:
    from google.protobuf.message import Message

DATA_SOURCE = "math_dapo"
_MANY_TURNS = 20_000  # more than are allowed: each costs the chat template time
_DESCENTS = 6
_REPEATS = (0, 1, 2, 2, 3, 65, 300, 5000)
# What services accept, by a field's name; other texts are "fuzz", other numbers 1.
_KNOWN: dict[str, Any] = {
    "role": "user",
    "content": "1 + 2 = ?",
    "data_source": DATA_SOURCE,
    "response": "Answer: 3",
    "ground_truth": "3",
    "host": "127.0.0.1",
    "address": "127.0.0.1:9",
    "backend": "gloo",
    "dtype": "float32",
    "digest": "ab" * 16,
    "plan_digest": "ab" * 16,
    "weights_layout_digest": "ab" * 16,
    "store_key": bytes(range(32)),
    "images": png(),
    "max_tokens": 6,
    "world_size": 2,
    "bucket_bytes": 4096,
    "lease_seconds": 0.5,
    "sample_index": 0,
    "start": 0,
    "top_k": -1,
}
_NEEDED = ("prompt", "chat", "sampling", "replica")
_BYTES = {"_u32": bytes([3, 0, 0, 0]), "_f32": bytes(4)}


def plausible(kind: type[Message], rng: random.Random) -> Message:
    """Return a request that a caller might send: some optional parts are there, some are not."""
    message = kind()
    _fill(message, rng, _DESCENTS)
    return message


def _fill(message: Any, rng: random.Random, descents: int) -> None:
    if isinstance(message, Struct):
        message.update({"index": 1})
        return
    chosen = {one.name: rng.choice(one.fields).name for one in message.DESCRIPTOR.oneofs}
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and chosen[oneof.name] != field.name:
            continue
        is_absent = field.has_presence and field.name not in _NEEDED and rng.random() < 0.4
        if not is_absent and descents > 0:
            _fill_field(message, field, rng, descents)


def _fill_field(message: Any, field: Any, rng: random.Random, descents: int) -> None:
    kind, name = field.message_type, field.name
    if kind is not None and kind.GetOptions().map_entry:
        if kind.fields_by_name["value"].message_type is None:
            getattr(message, name)["idle"] = 1
    elif field.label == FieldDescriptor.LABEL_REPEATED:
        values = getattr(message, name)
        if kind is None:
            values.append(_value(field))
        elif name == "messages" and rng.random() < 0.01:
            values.extend([values.add(role="u")] * _MANY_TURNS)
        elif name != "partials" or rng.random() < 0.3:
            _fill(values.add(), rng, descents - 1)
    elif kind is not None:
        _fill(getattr(message, name), rng, descents - 1)
        getattr(message, name).SetInParent()
    else:
        setattr(message, name, _value(field))


def _value(field: FieldDescriptor) -> Any:
    if field.name in _KNOWN:
        return _KNOWN[field.name]
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _BYTES.get(field.name[-4:], b"fuzz")
    return "fuzz" if field.type == FieldDescriptor.TYPE_STRING else 1


def mutated(message: Message, rng: random.Random) -> Message:
    """Return the message with one to three fields, at any depth, replaced by nasty values."""
    for _ in range(rng.randint(1, 3)):
        _mutate(message, rng, _DESCENTS)
    return message


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
        _fill_nastily(message, rng)
        return
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    kind = field.message_type
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif kind is not None and kind.GetOptions().map_entry:
        value = kind.fields_by_name["value"]
        for _ in range(rng.choice((1, 3, 200)) if value.message_type is None else 0):
            key = f"{nasty_text(rng)[:40]}{rng.random()}"
            getattr(message, field.name)[key] = nasty_scalar(value, rng)
    elif field.label == FieldDescriptor.LABEL_REPEATED:
        _mutate_repeated(message, field, rng, descents)
    elif kind is not None:
        _mutate(getattr(message, field.name), rng, descents - 1)
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, nasty_scalar(field, rng))


def _mutate_repeated(message: Any, field: FieldDescriptor, rng: random.Random, deep: int) -> None:
    values = getattr(message, field.name)
    if field.message_type is None:
        values.extend([nasty_scalar(field, rng)] * rng.choice(_REPEATS))
        values.append(nasty_scalar(field, rng))
    elif values and deep > 0 and rng.random() < 0.7:
        _mutate(values[rng.randrange(len(values))], rng, deep - 1)
    else:
        for _ in range(rng.choice(_REPEATS)):
            values.add()


def _fill_nastily(struct: Struct, rng: random.Random) -> None:
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
