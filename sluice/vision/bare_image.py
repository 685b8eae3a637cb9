"""An image file without anything that a decoder of pixels can do without.

Colour profiles, EXIF, XMP, comments and previews are data structures of other people, read by code
that was not written for files of strangers. What is not there cannot do harm.
"""

from __future__ import annotations

from struct import pack

from sluice.vision.image_parts import (
    JPEG_SCAN,
    PNG_SIGNATURE,
    jpeg_segments,
    png_chunks,
    webp_chunks,
)

__all__ = ["bare_image"]

_PNG_KEPT = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT"))
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
# Frames SOF0 to SOF15 with the tables DHT and DAC among them; DQT, DRI, the scan; APP0 and APP14
# (JFIF and Adobe), which say how colours are coded.
_JPEG_KEPT = frozenset((*range(0xC0, 0xC8), *range(0xC9, 0xD0), 0xDB, 0xDD, JPEG_SCAN, 0xE0, 0xEE))
_WEBP_KEPT, _WEBP_FRAMES = frozenset((b"VP8X", b"ALPH")), frozenset((b"VP8 ", b"VP8L"))
_WEBP_ALPHA = 0x10


def bare_image(data: bytes) -> bytes:
    """The same pixels in the same format, and nothing else.

    Args:
        data: a file that `sluice.vision.image_header.read_image_header` has read.

    Raises:
        BadImageError: a part is cut short.
    """
    if data.startswith(PNG_SIGNATURE):
        return _bare_png(data)
    return _bare_jpeg(data) if data.startswith(b"\xff\xd8") else _bare_webp(data)


def _bare_png(data: bytes) -> bytes:
    kept = [PNG_SIGNATURE]
    has_pixels = False
    for chunk in png_chunks(data):
        if has_pixels and chunk.name != b"IDAT":
            break
        has_pixels = chunk.name == b"IDAT"
        if chunk.name in _PNG_KEPT:
            kept.append(data[chunk.place : chunk.end + 4])
    return b"".join((*kept, _PNG_END))


def _bare_jpeg(data: bytes) -> bytes:
    """Behind the first scan's header all is kept: decoders skip what is no table or scan there."""
    kept = [data[:2]]
    end = 2
    for segment in jpeg_segments(data):
        if segment.name[0] in _JPEG_KEPT:
            kept.append(data[segment.place : segment.end])
        end = segment.end
    return b"".join((*kept, data[end:]))


def _bare_webp(data: bytes) -> bytes:
    kept = [b"WEBP"]
    for chunk in webp_chunks(data):
        content = data[chunk.start : chunk.end]
        if chunk.name == b"VP8X":
            content = bytes((content[0] & _WEBP_ALPHA,)) + content[1:] if content else content
        if chunk.name in _WEBP_KEPT | _WEBP_FRAMES:
            kept += [chunk.name, pack("<I", chunk.length), content, b"\0" * (chunk.length % 2)]
        if chunk.name in _WEBP_FRAMES:
            break
    body = b"".join(kept)
    return b"RIFF" + pack("<I", len(body)) + body
