"""Image files that no encoder writes: cut short, of another format, with impossible sizes, or with
metadata that is small in the file and huge in a reader that believes it."""

from __future__ import annotations

import random
import struct
import zlib

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# A grey image of 8 x 8 pixels each.
_SMALL_JPEG = bytes.fromhex(
    "ffd8ffe000104a46494600010100000100010000ffdb004300080606070605080707070909080a0c140d0c0b"
    "0b0c1912130f141d1a1f1e1d1a1c1c20242e2720222c231c1c2837292c30313434341f27393d38323c2e3334"
    "32ffc0000b080008000801011100ffc40014000100000000000000000000000000000000ffc4001410010000"
    "0000000000000000000000000000ffda0008010100003f003fffd9"
)
_SMALL_WEBP = bytes.fromhex(
    "524946461e000000574542505650384c110000002f07c001000750c00216b0ff8188e87f0000"
)
_SIDES = (0, 1, 4, 4096, 4097, 60_000, 2**31 - 1, 2**32 - 1)
_OTHERS = (
    *(b"GIF89a", b"BM", b"%PDF-1.7", b"<svg/>", b"MZ", b"\x7fELF", b"\0" * 64),
    *(b"\xff\xd8\xff\xd9", b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\3", b"RIFF\0\0\0\0WEBP"),
    b"RIFF\xff\xff\xff\xffWEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff",
)


def small_png(width: int = 4, height: int = 4) -> bytes:
    """Return a whole grey image of 4 x 4 pixels, whatever size it claims."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0\x80\x80\x80\x80" * 4)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def nasty_image(rng: random.Random) -> bytes:
    """Return bytes that begin as an image does, or as other files do."""
    match rng.randrange(7):
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
        case 4:
            return _with_a_bomb(rng)
        case 5:  # a chunk between the pixels and the end, which readers look at after decoding
            whole, name = small_png(), rng.choice((b"eXIf", b"iCCP", b"zTXt", b"IHDR", b"IDAT"))
            return whole[:-12] + _chunk(name, exif_bomb()) + whole[-12:]
        case _:
            return rng.choice(_OTHERS)


def exif_bomb(num_entries: int = 5000) -> bytes:
    """Return a TIFF directory of 60 KB in which each entry holds the same 60,000 bytes: 300 MB in
    all.
    """
    entries = b"".join(
        struct.pack("<HHII", 0x8000 + number, 7, 12 * num_entries, 8)
        for number in range(num_entries)
    )
    return b"II*\0" + struct.pack("<IH", 8, num_entries) + entries + bytes(4)


def png_with(whole: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG with further chunks (name, content) behind IHDR."""
    return whole[:33] + b"".join(_chunk(name, content) for name, content in chunks) + whole[33:]


def jpeg_with(whole: bytes, *segments: tuple[int, bytes]) -> bytes:
    """Return a JPEG with further segments (marker, content) at its beginning."""
    added = b"".join(
        struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content
        for marker, content in segments
    )
    return whole[:2] + added + whole[2:]


def webp_with(whole: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a WebP with further chunks (name, content) at its end."""
    body = whole[8:] + b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
        for name, content in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _with_a_bomb(rng: random.Random) -> bytes:
    bomb = exif_bomb()
    match rng.randrange(3):
        case 0:
            return png_with(small_png(), (b"eXIf", bomb))
        case 1:
            return jpeg_with(_SMALL_JPEG, (0xE1, b"Exif\0\0" + bomb))
        case _:
            return webp_with(_SMALL_WEBP, (b"EXIF", bomb))


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)
