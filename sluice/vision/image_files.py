"""Encoded images to pixels, within bounds that are checked before anything is decoded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from sluice.errors import ConfigError, InvalidRequestError
from sluice.vision.bare_image import bare_image
from sluice.vision.image_header import ImageHeader, read_image_header
from sluice.vision.image_parts import BadImageError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_IMAGE_PIXELS", "image_size", "read_image"]

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


def read_image(encoded: bytes, place: str) -> Image:
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
