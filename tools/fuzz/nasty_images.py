"""Image files that no encoder writes: cut short, of another format, or with impossible sizes."""

from __future__ import annotations

import random
import struct
import zlib

__all__ = ["nasty_image", "small_png"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIDES = (0, 1, 4, 4096, 4097, 60_000, 2**31 - 1, 2**32 - 1)
_OTHERS = (
    *(b"GIF89a", b"BM", b"%PDF-1.7", b"<svg/>", b"MZ", b"\x7fELF", b"\0" * 64),
    *(b"\xff\xd8\xff\xd9", b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\3", b"RIFF\0\0\0\0WEBP"),
    b"RIFF\xff\xff\xff\xffWEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff",
)


def small_png(width: int = 4, height: int = 4) -> bytes:
    """A whole grey image of 4 x 4 pixels, whatever size it claims."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0\x80\x80\x80\x80" * 4)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def nasty_image(rng: random.Random) -> bytes:
    """Something that begins as an image does, or as other files do."""
    match rng.randrange(5):
        case 0:
            return small_png(rng.choice(_SIDES), rng.choice(_SIDES))
        case 1:
            whole = small_png()
            return whole[: rng.randrange(len(whole))]
        case 2:
            damaged = bytearray(small_png())
            for _ in range(3):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            return bytes(damaged)
        case 3:
            return _SIGNATURE + _chunk(b"tEXt", b"") * rng.choice((1, 5000))
        case _:
            return rng.choice(_OTHERS)


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)
