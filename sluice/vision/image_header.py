"""Format and size of an encoded image, read from its headers; no pixel is decoded.

What a decoder would trust is what is looked at: every header that names a size counts, and a file
that names two is measured by the larger one.

Formats: PNG (ISO/IEC 15948, section 11.2), JPEG (ITU-T T.81, annex B), WebP (RFC 9649).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import unpack_from
from typing import Literal

from sluice.errors import InvalidRequestError

__all__ = ["FORMATS", "ImageHeader", "read_image_header"]

ImageFormat = Literal["PNG", "JPEG", "WebP"]
FORMATS = "PNG, JPEG or WebP"

MAX_PARTS = 4096
"""Chunks or markers of a file that are looked at; no camera writes as many before the pixels."""

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_SHOWN_BYTES = 12
_JPEG_END = b"\xff\xd9"
# Frame headers: SOF0 to SOF15, but for DHT, JPG and DAC, which lie among them.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END, _LONE = 0xDA, 0xD9, frozenset((0x01, *range(0xD0, 0xD9)))
_ANIMATED = 0x02


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a file says of itself; `width` and `height` in pixels, each at least 1."""

    format: ImageFormat
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        """Pixels that a decoder would make."""
        return self.width * self.height


def read_image_header(field: str, data: bytes) -> ImageHeader:
    """Format and size of an image file. Takes time in proportion to the number of its parts.

    Args:
        field: whose the bytes are, for errors.
        data: the whole file.

    Raises:
        InvalidRequestError: empty, of another format, cut short, animated, or without a size.
    """
    try:
        found = _header(data)
    except (_BadImageError, IndexError) as error:
        raise InvalidRequestError(f"{field}: {error}; send a whole file, {FORMATS}") from error
    if not found.width or not found.height:
        raise InvalidRequestError(
            f"{field}: {found.width} x {found.height} pixels; send an image that has some"
        )
    return found


class _BadImageError(ValueError):
    """What is wrong with a file."""


def _header(data: bytes) -> ImageHeader:
    if not data:
        raise _BadImageError("0 bytes")
    if data.startswith(_PNG):
        return ImageHeader("PNG", *_png_size(data))
    if data.startswith(_JPEG):
        return ImageHeader("JPEG", *_jpeg_size(data))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ImageHeader("WebP", *_webp_size(data))
    raise _BadImageError(f"{len(data)} bytes that begin with {data[:_SHOWN_BYTES]!r} are no image")


def _png_size(data: bytes) -> tuple[int, int]:
    size: tuple[int, int] | None = None
    for name, start, length in _png_chunks(data):
        if name == b"IHDR":
            if size is not None or length < 8:
                raise _BadImageError("a PNG needs one IHDR chunk")
            size = unpack_from(">II", data, start)
        elif size is None:
            raise _BadImageError("a PNG begins with IHDR")
        elif name == b"IDAT":
            break
    if size is None:
        raise _BadImageError("a PNG without IHDR")
    # The chunks of pixels may be very many: the end says whether they are all there.
    if data.rfind(b"IEND") < start:
        raise _BadImageError("a PNG that is cut short")
    return size


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, first byte and length of each chunk up to the end of the file."""
    place = len(_PNG)
    for _ in range(MAX_PARTS):
        if place + 12 > len(data):
            raise _BadImageError("a PNG that is cut short")
        (length,) = unpack_from(">I", data, place)
        if place + 12 + length > len(data):
            raise _BadImageError("a PNG that is cut short")
        yield data[place + 4 : place + 8], place + 8, length
        place += 12 + length
    raise _BadImageError(f"a PNG of more than {MAX_PARTS} chunks before its pixels")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    sizes: list[tuple[int, int]] = []
    for marker, start, length in _jpeg_segments(data):
        if marker in _FRAMES:
            if length < 6:
                raise _BadImageError("a JPEG whose frame header is cut short")
            height, width = unpack_from(">HH", data, start + 1)
            sizes.append((width, height))
        if marker == _SCAN:
            break
    if not sizes:
        raise _BadImageError("a JPEG without a frame header before its pixels")
    if len(sizes) > 1:
        raise _BadImageError("a JPEG with two frame headers")
    if data.rfind(_JPEG_END) < start:
        raise _BadImageError("a JPEG that is cut short")
    return sizes[0]


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, first byte and length of the content of each segment up to the scan."""
    place = 2
    for _ in range(MAX_PARTS):
        if place + 4 > len(data):
            raise _BadImageError("a JPEG that is cut short")
        if data[place] != 0xFF:
            raise _BadImageError("a JPEG with bytes between its segments")
        marker = data[place + 1]
        if marker == 0xFF:  # fill bytes may stand before a marker
            place += 1
        elif marker in _LONE:
            place += 2
        elif marker == _END:
            raise _BadImageError("a JPEG without pixels")
        else:
            (length,) = unpack_from(">H", data, place + 2)
            if length < 2 or place + 2 + length > len(data):
                raise _BadImageError("a JPEG that is cut short")
            yield marker, place + 4, length - 2
            place += 2 + length
    raise _BadImageError(f"a JPEG of more than {MAX_PARTS} segments before its pixels")


def _webp_size(data: bytes) -> tuple[int, int]:
    (riff_length,) = unpack_from("<I", data, 4)
    if len(data) < 20 or riff_length + 8 > len(data):
        raise _BadImageError("a WebP that is cut short")
    sizes = [size for size in _webp_sizes(data, riff_length + 8) if size is not None]
    if not sizes:
        raise _BadImageError("a WebP without an image")
    return max(sizes, key=lambda size: size[0] * size[1])


def _webp_sizes(data: bytes, end: int) -> Iterator[tuple[int, int] | None]:
    """The sizes that its chunks name: the canvas, and the frame itself, which is the last."""
    place = 12
    for _ in range(MAX_PARTS):
        if place + 8 > end:
            raise _BadImageError("a WebP without an image")
        name, (length,) = data[place : place + 4], unpack_from("<I", data, place + 4)
        start = place + 8
        if start + length > end:
            raise _BadImageError("a WebP that is cut short")
        if name == b"VP8X" and length >= 10:
            if data[start] & _ANIMATED:
                raise _BadImageError("a WebP that is animated")
            yield _three_bytes(data, start + 4) + 1, _three_bytes(data, start + 7) + 1
        elif name == b"VP8L" and length >= 5:
            (bits,) = unpack_from("<I", data, start + 1)
            yield (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
            return
        elif name == b"VP8 " and length >= 10:
            width, height = unpack_from("<HH", data, start + 6)
            yield width & 0x3FFF, height & 0x3FFF
            return
        place = start + length + length % 2
    raise _BadImageError(f"a WebP of more than {MAX_PARTS} chunks before its pixels")


def _three_bytes(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 3], "little")
