"""Encoded images to pixels, within bounds that are checked before anything is decoded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from sluice.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_IMAGE_PIXELS", "image_size", "read_image"]

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_IMAGE_PIXELS = 1 << 26
"""What a decoded image may hold, whatever limits are set: 67 million pixels take 200 MB in RGB."""

_ORIENTATION = 0x0112  # of EXIF; from 5 on, rows are stored as columns
_TRANSPOSED = range(5, 9)
_DAMAGE = (OSError, SyntaxError, ValueError)  # how Pillow's decoders tell of it


def image_size(encoded: bytes, place: str) -> tuple[int, int]:
    """Height and width in pixels as the image is meant to be seen, from its header alone.

    An orientation (EXIF) is heeded in JPEG and WebP files.

    Args:
        encoded: a PNG, JPEG or WebP file.
        place: names the image in errors.

    Raises:
        InvalidRequestError: it is none of these, damaged or too large.
    """
    with _opened(encoded, place) as image:
        width, height = image.size
        try:
            turned = _may_be_turned(image) and image.getexif().get(_ORIENTATION, 1) in _TRANSPOSED
        except _DAMAGE as error:
            raise _damaged(place, error) from error
    return (width, height) if turned else (height, width)


def read_image(encoded: bytes, place: str) -> Image:
    """The decoded image, upright as by `image_size`, in RGB; what is transparent is white.

    Args:
        encoded: a PNG, JPEG or WebP file.
        place: names the image in errors.

    Raises:
        InvalidRequestError: it is none of these, damaged or too large.
    """
    from PIL import ImageOps

    image = _opened(encoded, place)
    try:
        upright = ImageOps.exif_transpose(image) if _may_be_turned(image) else image
        return _without_transparency(upright)
    except _DAMAGE as error:
        raise _damaged(place, error) from error


def _may_be_turned(image: Image) -> bool:
    """Not PNG: there an orientation may follow the pixels, so that asking for it decodes them."""
    return image.format != "PNG"


def _damaged(place: str, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(
        f"{place}: the image is damaged ({error}); send a whole PNG, JPEG or WebP file"
    )


def _opened(encoded: bytes, place: str) -> Image:
    """Only the header has been read."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "prompts with images need Pillow; install it: pip install 'sluice[torch]'"
        ) from error
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        raise InvalidRequestError(
            f"{place}: {len(encoded)} bytes that are no readable image ({error}); send a PNG, "
            "JPEG or WebP file"
        ) from error
    pixels = image.width * image.height
    if not 0 < pixels <= MAX_IMAGE_PIXELS:
        raise InvalidRequestError(
            f"{place}: {image.width} x {image.height} pixels; send 1 to {MAX_IMAGE_PIXELS} in all"
        )
    return image


def _without_transparency(image: Image) -> Image:
    """Diagrams are often black lines on nothing, which would be black on black."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    from PIL import Image as images

    layered = image.convert("RGBA")
    white = images.new("RGBA", layered.size, (255, 255, 255, 255))
    return images.alpha_composite(white, layered).convert("RGB")
