"""Limit the number and size of a prompt's images.

The same rules hold for clients' calls, submitted prompts and rows of data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice.errors import InvalidRequestError
from sluice.types import IMAGE_MARK
from sluice.vision.image_header import read_image_header

_KEYS = "sluice.limits"
MAX_PIXELS = 1 << 25
"""Upper bound of the setting: 33 million pixels take 100 MB decoded."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on images; bytes count the encoded files.

    Attributes:
        max_images: images in one prompt.
        max_bytes: bytes of one image.
        max_total_bytes: bytes of all images in one prompt.
        max_pixels: width times height of one image.
    """

    max_images: int = 16
    max_bytes: int = 8 << 20
    max_total_bytes: int = 16 << 20
    max_pixels: int = 1 << 24


DEFAULT_LIMITS = ImageLimits()


def check_images(
    field: str, images: Sequence[bytes], texts: Iterable[str], limits: ImageLimits
) -> None:
    """Check a prompt's images against the limits. Read headers, decode no pixel.

    Args:
        field: name of the field that holds the images, for errors.
        images: encoded files.
        texts: texts of the prompt's turns, with one ``<image>`` for each image.

    Raises:
        InvalidRequestError: names the image, the value, and the setting or the remedy.
    """
    if not images:
        return
    check_image_count(field, len(images), limits)
    check_marks(field, len(images), texts)
    total = sum(map(len, images))
    if total > limits.max_total_bytes:
        raise InvalidRequestError(
            f"{field}: {total} bytes in all; {_KEYS}.max_prompt_images_mb allows "
            f"{limits.max_total_bytes}: send fewer or smaller images"
        )
    for index, image in enumerate(images):
        place = f"{field}[{index}]"
        if len(image) > limits.max_bytes:
            raise InvalidRequestError(
                f"{place}: {len(image)} bytes; {_KEYS}.max_image_mb allows {limits.max_bytes}: "
                "send a smaller image"
            )
        header = read_image_header(place, image)
        if header.num_pixels > limits.max_pixels:
            raise InvalidRequestError(
                f"{place}: {header.width} x {header.height} pixels; {_KEYS}.max_image_pixels "
                f"allows {limits.max_pixels}: send a smaller image"
            )


def check_image_count(field: str, num_images: int, limits: ImageLimits) -> None:
    """Check the number of images in a prompt. Raise InvalidRequestError."""
    if num_images > limits.max_images:
        raise InvalidRequestError(
            f"{field}: {num_images} images; {_KEYS}.max_prompt_images allows {limits.max_images}"
        )


def check_marks(field: str, num_images: int, texts: Iterable[str]) -> None:
    """Check that the texts hold as many ``<image>`` marks as there are images, if any.

    Raises:
        InvalidRequestError: names both numbers.
    """
    marks = sum(text.count(IMAGE_MARK) for text in texts)
    if num_images and marks != num_images:
        raise InvalidRequestError(
            f"{field}: {num_images} images for {marks} times {IMAGE_MARK} in the texts; write "
            f"{IMAGE_MARK} where each image belongs"
        )
