"""Values that protobuf allows and that no sensible caller sends, by type of field.

Images are cut short, damaged, of another format, or of impossible sizes.
"""

from __future__ import annotations

import math
import random

from google.protobuf.descriptor import FieldDescriptor

from tests.support.image_files import PNG_SIGNATURE, png, png_chunk

_INT32 = (0, 1, -1, 2, 7, 64, 1023, 1024, 65535, 2**31 - 1, -(2**31))
_INT64 = (*_INT32, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63))
_UINT32 = (0, 1, 2, 3, 7, 256, 257, 1023, 1024, 65535, 65536, 2**31, 2**32 - 1)
_UINT64 = (*_UINT32, 2**53 + 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 100.0, 100.1, math.nan, math.inf, -math.inf, 1e30)
# fmt: off
_TEXTS = (
    "", " ", "a", "\0", "\n\r\t", "\x1b[2J\x07", "\u202e", "\ufeff", "é" * 64, "日本語",
    "\U0001f600",
    "../../etc/passwd", "data-0", "'; DROP TABLE prompts; --", "%s%n%x", "{{ 7 * 7 }}", "${HOME}",
    "localhost:0", "127.0.0.1:99999", "[::1", "http://[", "unix:/tmp/x", "host:port", ":1", "nan",
    "\\boxed{" * 50, "#### 1,1,1", "<|im_start|>", "</think>", "9" * 400, "(" * 300,
)
# fmt: on
_SIZES = (1, 127, 128, 129, 1000, 5000, 70_000)

_SIDES = (0, 1, 4, 4096, 4097, 60_000, 2**31 - 1, 2**32 - 1)
_OTHERS = (
    *(b"GIF89a", b"BM", b"%PDF-1.7", b"<svg/>", b"MZ", b"\x7fELF", b"\0" * 64),
    *(b"\xff\xd8\xff\xd9", b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\3", b"RIFF\0\0\0\0WEBP"),
    b"RIFF\xff\xff\xff\xffWEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff",
)


def nasty_text(rng: random.Random) -> str:
    """Return a text that is odd, or long."""
    if rng.random() < 0.85:
        return rng.choice(_TEXTS)
    return rng.choice(("x", "é", "\0", " a", "{", "<|im_end|>")) * rng.choice(_SIZES)


def nasty_bytes(rng: random.Random) -> bytes:
    """Return bytes of any length, whole numbers of four among them; or a fake image."""
    if rng.random() < 0.25:
        return nasty_image(rng)
    size = rng.choice((0, 1, 2, 3, 4, 5, 8, 16, 63, 64, 256, 4096))
    return rng.randbytes(size) if rng.random() < 0.5 else bytes([rng.randrange(4), 0, 0, 0]) * size


def nasty_scalar(field: FieldDescriptor, rng: random.Random) -> object:
    """Return a value of a field that holds no message; enumerations get unknown numbers too."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice(_INT32)
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice(_INT64)
        case FieldDescriptor.CPPTYPE_UINT32:
            return rng.choice(_UINT32)
        case FieldDescriptor.CPPTYPE_UINT64:
            return rng.choice(_UINT64)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING:
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            return nasty_bytes(rng) if is_bytes else nasty_text(rng)
        case _:
            return rng.choice(_FLOATS)


def nasty_image(rng: random.Random) -> bytes:
    """Return bytes that begin as an image does, or as other files do."""
    match rng.randrange(5):
        case 0:
            return png(claims=(rng.choice(_SIDES), rng.choice(_SIDES)))
        case 1:
            whole = png()
            return whole[: rng.randrange(len(whole))]
        case 2:
            damaged = bytearray(png())
            for _ in range(3):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            return bytes(damaged)
        case 3:
            return PNG_SIGNATURE + png_chunk(b"tEXt", b"") * rng.choice((1, 5000))
        case _:
            return rng.choice(_OTHERS)
