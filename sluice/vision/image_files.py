"""Read images within bounds that are checked first: those of a data-set row, and files into
pixels.
"""

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


FORMATS = ("PNG", "JPEG", "WEBP")
MAX_IMAGE_PIXELS = 1 << 26
"""What a decoded image may hold, whatever limits are set: 67 million pixels take 200 MB in RGB."""

# By EXIF's orientation: the name in Pillow of what undoes it.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def image_size(encoded: bytes, place: str) -> tuple[int, int]:
    """Height and width in pixels as the image is meant to be seen, from its header alone.

    An orientation (EXIF) is heeded in JPEG and WebP files.

    Args:
        encoded: a PNG, JPEG or WebP file.
        place: names the image in errors.

    Raises:
        InvalidRequestError: it is none of these, damaged or too large.
    """
    return _checked_header(encoded, place).upright_size


def decode_image(encoded: bytes, place: str) -> Image:
    """The decoded image, upright as by `image_size`, in RGB; what is transparent is white.

    Pillow is given pixels alone, none of the file's metadata.

    Args:
        encoded: a PNG, JPEG or WebP file.
        place: names the image in errors.

    Raises:
        InvalidRequestError: it is none of these, damaged or too large.
        ConfigError: Pillow is not installed.
    """
    header = _checked_header(encoded, place)
    try:
        import PIL.Image  # noqa: F401 - told apart from whatever decoding raises
    except ImportError as error:
        raise ConfigError(
            "prompts with images need Pillow; install it: pip install 'sluice[torch]'"
        ) from error
    try:
        return _decoded(bare_image(encoded), header)
    except MemoryError:
        raise
    # Pillow's decoders tell of damage by whatever they stumble over: OSError, SyntaxError,
    # struct.error, EOFError, KeyError and more; none of it may break the service.
    except Exception as error:
        raise InvalidRequestError(
            f"{place}: the image is damaged ({error}); send a whole PNG, JPEG or WebP file"
        ) from error


def _decoded(bare: bytes, header: ImageHeader) -> Image:
    from PIL import Image as images

    image = images.open(io.BytesIO(bare), formats=FORMATS)
    if image.size != (header.width, header.height):
        raise BadImageError(f"{image.width} x {image.height} pixels, which its header does not say")
    upright = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if header.orientation in _TURNS:
        upright = upright.transpose(images.Transpose[_TURNS[header.orientation]])
    return _on_white(upright)


def _checked_header(encoded: bytes, place: str) -> ImageHeader:
    header = read_image_header(place, encoded)
    if header.num_pixels > MAX_IMAGE_PIXELS:
        raise InvalidRequestError(
            f"{place}: {header.width} x {header.height} pixels; send 1 to {MAX_IMAGE_PIXELS} in all"
        )
    return header


def _on_white(image: Image) -> Image:
    """Diagrams are often black lines on nothing, which would be black on black."""
    if image.mode == "RGB":
        return image
    from PIL import Image as images

    white = images.new("RGBA", image.size, (255, 255, 255, 255))
    return images.alpha_composite(white, image).convert("RGB")


def images_of_row(row: PromptRow, path: str, limits: ImageLimits | None) -> tuple[bytes, ...]:
    """The encoded images of a row, read and checked.

    Args:
        row: with the images or their paths.
        path: of the row's file, beside which relative paths are looked up.
        limits: the most of each; ``None``: no images are read.

    Raises:
        DataError: names file and row, the image, and the remedy.
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
