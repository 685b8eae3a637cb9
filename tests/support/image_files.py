"""Image files made by hand, so that they can say of themselves what no encoder would."""

from __future__ import annotations

import struct
import zlib

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png_chunk(name: bytes, content: bytes) -> bytes:
    """A chunk with its length and checksum."""
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def png(
    width: int = 4, height: int = 3, *, shade: int = 0, claims: tuple[int, int] | None = None
) -> bytes:
    """A grey PNG whose header says `claims` (width, height) if they are given."""
    row = b"\0" + bytes([shade]) * width
    header = struct.pack(">IIBBBBB", *(claims or (width, height)), 8, 0, 0, 0, 0)
    return (
        PNG_SIGNATURE
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(row * height))
        + png_chunk(b"IEND", b"")
    )


def jpeg_segment(marker: int, content: bytes) -> bytes:
    """A segment with its length."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def jpeg(*sizes: tuple[int, int]) -> bytes:
    """Headers of a JPEG, a frame for each (width, height), and an empty scan."""
    frames = b"".join(
        jpeg_segment(0xC0, struct.pack(">BHHB", 8, height, width, 0)) for width, height in sizes
    )
    return (
        b"\xff\xd8" + jpeg_segment(0xE0, b"JFIF\0") + frames + jpeg_segment(0xDA, b"") + b"\xff\xd9"
    )


def webp(*chunks: tuple[bytes, bytes], before: bytes = b"WEBP") -> bytes:
    """A WebP of these chunks; `before` are its name and earlier chunks."""
    body = before + b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
        for name, content in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int, flags: int = 0) -> tuple[bytes, bytes]:
    """The extended header."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"VP8X", bytes([flags, 0, 0, 0]) + size


def webp_lossless(width: int, height: int) -> tuple[bytes, bytes]:
    """A lossless frame's header."""
    return b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)


def webp_lossy(width: int, height: int) -> tuple[bytes, bytes]:
    """A lossy frame's header."""
    return b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height)


# ------------------------------------------------------------------------------------ metadata


def exif_bomb(num_entries: int = 5000) -> bytes:
    """A TIFF directory of 60 KB in which each entry holds the same 60,000 bytes: 300 MB in all."""
    entries = b"".join(
        struct.pack("<HHII", 0x8000 + number, 7, 12 * num_entries, 8)
        for number in range(num_entries)
    )
    return b"II*\0" + struct.pack("<IH", 8, num_entries) + entries + bytes(4)


def png_with(whole: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG with further chunks (name, content) behind IHDR."""
    return whole[:33] + b"".join(png_chunk(*one) for one in chunks) + whole[33:]


def jpeg_with(whole: bytes, *segments: tuple[int, bytes]) -> bytes:
    """A JPEG with further segments (marker, content) at its beginning."""
    return whole[:2] + b"".join(jpeg_segment(*one) for one in segments) + whole[2:]


def webp_with(whole: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A WebP with further chunks (name, content) at its end."""
    return webp(*chunks, before=whole[8:])
