"""Image files with added metadata, and metadata that is small in a file and huge in a reader."""

from __future__ import annotations

import struct
import zlib


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


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)
