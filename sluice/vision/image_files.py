"""Read the images of a data-set row, and decode image files, within limits checked beforehand."""

from __future__ import annotations

import io
from pathlib import Path
from struct import pack
from typing import TYPE_CHECKING

from sluice.data.image_sources import read_image
from sluice.data.prompt_rows import PromptRow
from sluice.errors import ConfigError, DataError, InvalidRequestError
from sluice.vision.image_header import (
    JPEG_SCAN,
    PNG_SIGNATURE,
    BadImageError,
    ImageHeader,
    jpeg_segments,
    png_chunks,
    read_image_header,
    webp_chunks,
)
from sluice.vision.image_limits import ImageLimits, check_image_count, check_images

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = ("PNG", "JPEG", "WEBP")
MAX_IMAGE_PIXELS = 1 << 26
"""Largest decoded image under any settings: 67 million pixels take 200 MB in RGB."""

# EXIF orientation -> name of the Pillow transpose that undoes it.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}

_PNG_KEPT = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT"))
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
# Frames SOF0 to SOF15 with the tables DHT and DAC, DQT, DRI, the scan, and APP0 and APP14 (JFIF and
# Adobe), which define the colour coding.
_JPEG_KEPT = frozenset((*range(0xC0, 0xC8), *range(0xC9, 0xD0), 0xDB, 0xDD, JPEG_SCAN, 0xE0, 0xEE))
_WEBP_KEPT, _WEBP_FRAMES = frozenset((b"VP8X", b"ALPH")), frozenset((b"VP8 ", b"VP8L"))
_WEBP_ALPHA = 0x10


def strip_metadata(data: bytes) -> bytes:
    """Return the file with its pixels alone, without any metadata.

    Args:
        data: a file that `read_image_header` accepted.

    Raises:
        BadImageError: a part is cut short.
    """
    if data.startswith(PNG_SIGNATURE):
        return _strip_png(data)
    return _strip_jpeg(data) if data.startswith(b"\xff\xd8") else _strip_webp(data)


def _strip_png(data: bytes) -> bytes:
    parts = [PNG_SIGNATURE]
    has_pixels = False
    for chunk in png_chunks(data):
        if has_pixels and chunk.name != b"IDAT":
            break
        has_pixels = chunk.name == b"IDAT"
        if chunk.name in _PNG_KEPT:
            parts.append(data[chunk.place : chunk.end + 4])
    return b"".join((*parts, _PNG_END))


def _strip_jpeg(data: bytes) -> bytes:
    """Keep everything behind the first scan's header: decoders skip all but tables and scans."""
    parts = [data[:2]]
    end = 2
    for segment in jpeg_segments(data):
        if segment.name[0] in _JPEG_KEPT:
            parts.append(data[segment.place : segment.end])
        end = segment.end
    return b"".join((*parts, data[end:]))


def _strip_webp(data: bytes) -> bytes:
    parts = [b"WEBP"]
    for chunk in webp_chunks(data):
        content = data[chunk.start : chunk.end]
        if chunk.name == b"VP8X":
            content = bytes((content[0] & _WEBP_ALPHA,)) + content[1:] if content else content
        if chunk.name in _WEBP_KEPT | _WEBP_FRAMES:
            parts += [chunk.name, pack("<I", chunk.length), content, b"\0" * (chunk.length % 2)]
        if chunk.name in _WEBP_FRAMES:
            break
    body = b"".join(parts)
    return b"RIFF" + pack("<I", len(body)) + body


def image_size(encoded: bytes, place: str) -> tuple[int, int]:
    """Return height and width in pixels, after the EXIF orientation, from the header alone.

    Args:
        encoded: a PNG, JPEG or WebP file.
        place: name of the image, for errors.

    Raises:
        InvalidRequestError: the file has another format, is damaged or too large.
    """
    return _check_header(encoded, place).upright_size


def decode_image(encoded: bytes, place: str) -> Image:
    """Decode an image to RGB, upright, with transparent pixels on white.

    Pillow gets the pixels alone, without the file's metadata.

    Raises:
        InvalidRequestError: the file has another format, is damaged or too large.
        ConfigError: Pillow is not installed.
    """
    header = _check_header(encoded, place)
    try:
        import PIL.Image  # noqa: F401 - a missing package is not a damaged image
    except ImportError as error:
        raise ConfigError(
            "prompts with images need Pillow; install it: pip install 'sluice[torch]'"
        ) from error
    try:
        return _decode(strip_metadata(encoded), header)
    except MemoryError:
        raise
    # Pillow's decoders raise whatever they stumble over in a damaged file: OSError, SyntaxError,
    # struct.error, EOFError, KeyError and more. None of it may break the service.
    except Exception as error:
        raise InvalidRequestError(
            f"{place}: the image is damaged ({error}); send a whole PNG, JPEG or WebP file"
        ) from error


def _decode(bare: bytes, header: ImageHeader) -> Image:
    from PIL import Image as images

    image: Image = images.open(io.BytesIO(bare), formats=FORMATS)
    if image.size != (header.width, header.height):
        raise BadImageError(f"{image.width} x {image.height} pixels differ from its header")
    if image.mode.startswith("I"):  # 16 bits of gray, which Pillow would clip to 8
        image = image.point(lambda value: value / 257).convert("L")
        if "transparency" in image.info:
            image.info["transparency"] //= 257
    upright = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if header.orientation in _TURNS:
        upright = upright.transpose(images.Transpose[_TURNS[header.orientation]])
    return _on_white(upright)


def _check_header(encoded: bytes, place: str) -> ImageHeader:
    header = read_image_header(place, encoded)
    if header.num_pixels > MAX_IMAGE_PIXELS:
        raise InvalidRequestError(
            f"{place}: {header.width} x {header.height} pixels; send 1 to {MAX_IMAGE_PIXELS} in all"
        )
    return header


def _on_white(image: Image) -> Image:
    """Put transparent pixels on white: a diagram of black lines would else be black on black."""
    if image.mode == "RGB":
        return image
    from PIL import Image as images

    white = images.new("RGBA", image.size, (255, 255, 255, 255))
    return images.alpha_composite(white, image).convert("RGB")


def images_of_row(row: PromptRow, path: str, limits: ImageLimits | None) -> tuple[bytes, ...]:
    """Read and check the encoded images of a row.

    Args:
        path: the row's file; relative paths of images start from its folder.
        limits: limits on number and size; ``None`` reads no image.

    Raises:
        DataError: an image is missing or beyond a limit; names file, row, image and remedy.
    """
    if not row.images or limits is None:
        return ()
    try:
        check_image_count("images", len(row.images), limits)
        folder = Path(path).parent
        images = tuple(
            read_image(f"images[{index}]", source, folder, limits.max_bytes)
            for index, source in enumerate(row.images)
        )
        check_images("images", images, (turn.content for turn in row.messages), limits)
    except (InvalidRequestError, DataError) as error:
        raise DataError(f"{row.place}: {error}; or repair or remove the row") from error
    return images
