"""Read format, size and orientation of an encoded image from its headers. Decode no pixel.

Images come from clients and data files, so they are hostile. A file that names two sizes is
measured by the larger one, and a file that is cut short is refused before a replica gets it.

Pillow cannot replace this module. Pillow 12.3.0 parses the whole EXIF part when it opens a JPEG
without a JFIF density: a file of 65 kB whose EXIF entries share one value took 290 MB of memory,
more than the whole reward service may use. Without that step (in a subclass) it still joins EXIF
segments one by one, in time that grows with the square of their number: 27 s for a file of 1.4 MB
with 120,000 of them. Pillow also opens files that are cut short.

Formats: PNG (ISO/IEC 15948, sections 5 and 11.2), JPEG (ITU-T T.81, annex B), WebP (RFC 9649,
section 2), EXIF 2.32 section 4.6 in TIFF 6.0 section 2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from struct import unpack_from
from typing import Literal

from sluice.errors import InvalidRequestError

MAX_PARTS = 4096
"""Largest number of chunks or segments to read. No camera writes as many before the pixels."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_SCAN = 0xDA
_JPEG_MARKER_END, _JPEG_LONE = 0xD9, frozenset((0x01, *range(0xD0, 0xD9)))
_WEBP_FIRST = 12
ImageFormat = Literal["PNG", "JPEG", "WebP"]
FORMATS = "PNG, JPEG or WebP"

_JPEG = b"\xff\xd8\xff"
_SHOWN_BYTES = 12
_JPEG_END = b"\xff\xd9"
# Frame headers SOF0 to SOF15. DHT, JPG and DAC share their range.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_APP1 = 0xE1
_ANIMATED = 0x02
_TRANSPOSED = range(5, 9)

MAX_EXIF_BYTES = 1 << 16
"""Longest EXIF part to read; a JPEG cannot hold a longer one."""
UPRIGHT = 1

_EXIF = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_TAG, _SHORT, _ENTRY_BYTES = 0x0112, 3, 12


class BadImageError(ValueError):
    """A file that cannot be read as an image; the message names the fault."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """One chunk (PNG, WebP) or segment (JPEG) of a file.

    Attributes:
        name: 4 bytes of a chunk's name, or the second byte of a segment's marker.
        place: offset of the first byte, its header included.
        start: offset of the content.
        end: offset behind the content.
    """

    name: bytes
    place: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """Bytes of content."""
        return self.end - self.start


def png_chunks(data: bytes) -> Iterator[ImagePart]:
    """Yield the chunks of a PNG up to the end of the file.

    Raises:
        BadImageError: a chunk is cut short, or there are too many besides pixel data.
    """
    place, num_others = len(PNG_SIGNATURE), 0
    while num_others < MAX_PARTS:
        if place + 12 > len(data):
            raise BadImageError("a PNG that is cut short")
        (length,) = unpack_from(">I", data, place)
        if place + 12 + length > len(data):
            raise BadImageError("a PNG that is cut short")
        name = data[place + 4 : place + 8]
        num_others += name != b"IDAT"
        yield ImagePart(name, place, place + 8, place + 8 + length)
        place += 12 + length
    raise BadImageError(f"a PNG of more than {MAX_PARTS} chunks before its pixels")


def jpeg_segments(data: bytes) -> Iterator[ImagePart]:
    """Yield the segments of a JPEG up to the header of its first scan.

    Raises:
        BadImageError: a segment is cut short, there are too many, or no scan follows.
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
        elif marker == _JPEG_MARKER_END:
            raise BadImageError("a JPEG without pixels")
        else:
            (length,) = unpack_from(">H", data, place + 2)
            if length < 2 or place + 2 + length > len(data):
                raise BadImageError("a JPEG that is cut short")
            yield ImagePart(bytes((marker,)), place, place + 4, place + 2 + length)
            if marker == JPEG_SCAN:
                return
            place += 2 + length
    raise BadImageError(f"a JPEG of more than {MAX_PARTS} segments before its pixels")


def webp_chunks(data: bytes) -> Iterator[ImagePart]:
    """Yield the chunks of a WebP up to the end that its header states.

    Raises:
        BadImageError: a chunk is cut short, or there are too many.
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
        yield ImagePart(name, place, start, start + length)
        place = start + length + length % 2
    raise BadImageError(f"a WebP of more than {MAX_PARTS} chunks")


def exif_orientation(exif: bytes) -> int:
    """Return the EXIF orientation, 1 to 8, or 1 (upright) if there is none.

    Read only this one entry of two bytes: a general reader copies what every entry points at, and
    thousands of entries may point at the same bytes.

    Args:
        exif: a TIFF header and its directories, with or without the prefix ``Exif\\0\\0``.
    """
    tiff = exif.removeprefix(_EXIF)
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None or len(exif) > MAX_EXIF_BYTES:
        return UPRIGHT
    try:
        (directory,) = unpack_from(f"{order}I", tiff, 4)
        (entries,) = unpack_from(f"{order}H", tiff, directory)
        for entry in range(entries):
            place = directory + 2 + entry * _ENTRY_BYTES
            tag, kind, count, value = unpack_from(f"{order}HHIH", tiff, place)
            if tag == _TAG:
                is_one = kind == _SHORT and count == 1 and 1 <= value <= 8
                return int(value) if is_one else UPRIGHT
    except struct.error:  # an offset beyond the end of the part
        return UPRIGHT
    return UPRIGHT


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The header of an encoded image.

    Attributes:
        width: width as stored, in pixels, at least 1.
        height: height as stored, in pixels, at least 1.
        orientation: EXIF orientation, 1 to 8. Always 1 for PNG, where it is not read.
    """

    format: ImageFormat
    width: int
    height: int
    orientation: int = UPRIGHT

    @property
    def num_pixels(self) -> int:
        """Number of pixels after decoding."""
        return self.width * self.height

    @property
    def upright_size(self) -> tuple[int, int]:
        """Height and width after the orientation is applied, in pixels."""
        if self.orientation in _TRANSPOSED:
            return self.width, self.height
        return self.height, self.width


def read_image_header(field: str, data: bytes) -> ImageHeader:
    """Read the header of an image, in time linear in the number of its parts.

    Args:
        field: name of the field that holds the image, for errors.
        data: the whole file.

    Raises:
        InvalidRequestError: the file is empty, of another format, cut short, animated, or has no
            size.
    """
    try:
        header = _header(data)
    except (BadImageError, IndexError) as error:
        raise InvalidRequestError(f"{field}: {error}; send a whole file, {FORMATS}") from error
    if not header.width or not header.height:
        raise InvalidRequestError(
            f"{field}: {header.width} x {header.height} pixels; send an image that has some"
        )
    return header


def _header(data: bytes) -> ImageHeader:
    if not data:
        raise BadImageError("0 bytes")
    if data.startswith(PNG_SIGNATURE):
        return _png_header(data)
    if data.startswith(_JPEG):
        return _jpeg_header(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp_header(data)
    raise BadImageError(f"{len(data)} bytes that begin with {data[:_SHOWN_BYTES]!r} are no image")


def _png_header(data: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    start = 0
    for chunk in png_chunks(data):
        start = chunk.start
        if chunk.name == b"IHDR":
            if size is not None or chunk.length < 8:
                raise BadImageError("a PNG needs one IHDR chunk")
            size = unpack_from(">II", data, start)
        elif size is None:
            raise BadImageError("a PNG begins with IHDR")
        elif chunk.name == b"IDAT":
            break
    if size is None:
        raise BadImageError("a PNG without IHDR")
    # There may be very many pixel chunks: look for the end marker instead of reading them all.
    if data.rfind(b"IEND") < start:
        raise BadImageError("a PNG that is cut short")
    return ImageHeader("PNG", *size)


def _jpeg_header(data: bytes) -> ImageHeader:
    sizes: list[tuple[int, int]] = []
    orientation, start = 0, 0
    for segment in jpeg_segments(data):
        marker, start = segment.name[0], segment.start
        if marker in _FRAMES:
            if segment.length < 6:
                raise BadImageError("a JPEG whose frame header is cut short")
            height, width = unpack_from(">HH", data, start + 1)
            sizes.append((width, height))
        if marker == _APP1 and not orientation and data.startswith(_EXIF, start, segment.end):
            orientation = exif_orientation(data[start : segment.end])
    if not sizes:
        raise BadImageError("a JPEG without a frame header before its pixels")
    if len(sizes) > 1:
        raise BadImageError("a JPEG with two frame headers")
    if data.rfind(_JPEG_END) < start:
        raise BadImageError("a JPEG that is cut short")
    return ImageHeader("JPEG", *sizes[0], orientation or UPRIGHT)


def _webp_header(data: bytes) -> ImageHeader:
    """Take the larger of canvas and frame. The orientation follows the frame."""
    sizes: list[tuple[int, int]] = []
    orientation, has_frame = 0, False
    for chunk in webp_chunks(data):
        if not has_frame and (size := _webp_size(data, chunk)) is not None:
            sizes.append(size)
            has_frame = chunk.name != b"VP8X"
        if chunk.name == b"EXIF" and not orientation and chunk.length <= MAX_EXIF_BYTES:
            orientation = exif_orientation(data[chunk.start : chunk.end])
    if not has_frame:
        raise BadImageError("a WebP without an image")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return ImageHeader("WebP", width, height, orientation or UPRIGHT)


def _webp_size(data: bytes, chunk: ImagePart) -> tuple[int, int] | None:
    start = chunk.start
    if chunk.name == b"VP8X" and chunk.length >= 10:
        if data[start] & _ANIMATED:
            raise BadImageError("a WebP that is animated")
        return _three_bytes(data, start + 4) + 1, _three_bytes(data, start + 7) + 1
    if chunk.name == b"VP8L" and chunk.length >= 5:
        (bits,) = unpack_from("<I", data, start + 1)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk.name == b"VP8 " and chunk.length >= 10:
        width, height = unpack_from("<HH", data, start + 6)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _three_bytes(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 3], "little")
