"""The parts that an image file is made of: PNG's chunks, JPEG's segments, WebP's chunks.

Formats: PNG (ISO/IEC 15948, section 5), JPEG (ITU-T T.81, annex B), WebP (RFC 9649, section 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import unpack_from

__all__ = [
    "JPEG_SCAN",
    "MAX_PARTS",
    "PNG_SIGNATURE",
    "BadImageError",
    "Part",
    "jpeg_segments",
    "png_chunks",
    "webp_chunks",
]

MAX_PARTS = 4096
"""Chunks or markers of a file that are looked at; no camera writes as many before the pixels."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_SCAN = 0xDA
_JPEG_END, _JPEG_LONE = 0xD9, frozenset((0x01, *range(0xD0, 0xD9)))
_WEBP_FIRST = 12


class BadImageError(ValueError):
    """What is wrong with a file."""


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk or segment.

    Attributes:
        name: of a chunk, 4 bytes; of a segment its marker's second byte.
        place: of its first byte in the file, headers and all.
        start: of its content.
        end: behind its content.
    """

    name: bytes
    place: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """Bytes of content."""
        return self.end - self.start


def png_chunks(data: bytes) -> Iterator[Part]:
    """The chunks of a PNG, up to the end of the file; those of pixels may be very many.

    Raises:
        BadImageError: one is cut short, or there are too many.
    """
    place, others = len(PNG_SIGNATURE), 0
    while others < MAX_PARTS:
        if place + 12 > len(data):
            raise BadImageError("a PNG that is cut short")
        (length,) = unpack_from(">I", data, place)
        if place + 12 + length > len(data):
            raise BadImageError("a PNG that is cut short")
        name = data[place + 4 : place + 8]
        others += name != b"IDAT"
        yield Part(name, place, place + 8, place + 8 + length)
        place += 12 + length
    raise BadImageError(f"a PNG of more than {MAX_PARTS} chunks before its pixels")


def jpeg_segments(data: bytes) -> Iterator[Part]:
    """The segments of a JPEG up to its first scan's header, which is the last.

    Raises:
        BadImageError: one is cut short, there are too many, or no scan comes.
    """
    place = 2
    for _ in range(MAX_PARTS):
        if place + 4 > len(data):
            raise BadImageError("a JPEG that is cut short")
        if data[place] != 0xFF:
            raise BadImageError("a JPEG with bytes between its segments")
        marker = data[place + 1]
        if marker == 0xFF:  # fill bytes may stand before a marker
            place += 1
        elif marker in _JPEG_LONE:
            place += 2
        elif marker == _JPEG_END:
            raise BadImageError("a JPEG without pixels")
        else:
            (length,) = unpack_from(">H", data, place + 2)
            if length < 2 or place + 2 + length > len(data):
                raise BadImageError("a JPEG that is cut short")
            yield Part(bytes((marker,)), place, place + 4, place + 2 + length)
            if marker == JPEG_SCAN:
                return
            place += 2 + length
    raise BadImageError(f"a JPEG of more than {MAX_PARTS} segments before its pixels")


def webp_chunks(data: bytes) -> Iterator[Part]:
    """The chunks of a WebP, up to the end that it names itself.

    Raises:
        BadImageError: one is cut short, or there are too many.
    """
    if len(data) < _WEBP_FIRST + 8:
        raise BadImageError("a WebP that is cut short")
    end = unpack_from("<I", data, 4)[0] + 8
    if end > len(data):
        raise BadImageError("a WebP that is cut short")
    place = _WEBP_FIRST
    for _ in range(MAX_PARTS):
        if place + 8 > end:
            return
        name, (length,) = data[place : place + 4], unpack_from("<I", data, place + 4)
        start = place + 8
        if start + length > end:
            raise BadImageError("a WebP that is cut short")
        yield Part(name, place, start, start + length)
        place = start + length + length % 2
    raise BadImageError(f"a WebP of more than {MAX_PARTS} chunks")
