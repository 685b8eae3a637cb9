"""Conversations with images, as a client gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.data.image_sources import read_image
from sluice.types import ChatMessage
from sluice.vision.image_header import read_image_header
from sluice.vision.image_limits import check_marks

Image = bytes | str | Path
"""An encoded file (PNG, JPEG or WebP), or the path of one."""

_LARGEST_FILE_BYTES = 1 << 30
"""More than any service takes; it only keeps a wrong path from filling the memory."""


@dataclass(frozen=True, slots=True)
class ChatWithImages:
    """Turns for the chat template, with as many images as their texts hold ``<image>``, in order.

    What a run takes at most is its own setting (`sluice.limits`); it refuses more by name.
    """

    messages: Sequence[ChatMessage]
    images: Sequence[Image]


def encoded_images(owner: str, chat: ChatWithImages) -> list[bytes]:
    """The images as they are sent; paths are relative to the current folder.

    Args:
        owner: whose they are, for errors.
        chat: with the images.

    Raises:
        InvalidRequestError: they are not as many as marks, or one is no whole image.
        DataError: a file cannot be read.
    """
    field = f"{owner}: images"
    check_marks(field, len(chat.images), (turn.content for turn in chat.messages))
    return [_encoded(f"{field}[{index}]", image) for index, image in enumerate(chat.images)]


def _encoded(field: str, image: Image) -> bytes:
    source = str(image) if isinstance(image, Path) else image
    data = read_image(field, source, Path(), _LARGEST_FILE_BYTES)
    read_image_header(field, data)
    return data
