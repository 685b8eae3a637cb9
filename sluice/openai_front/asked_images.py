"""Turns of a chat request, with the images that stand among their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from sluice.client.generation_types import Prompt
from sluice.client.images import ChatWithImages
from sluice.codec.field_rules import shortened
from sluice.data.image_sources import DATA_URI, image_of_uri
from sluice.errors import InvalidRequestError
from sluice.openai_front.refusals import RefusedError
from sluice.types import IMAGE_MARK, ChatMessage
from sluice.vision.image_header import FORMATS, read_image_header

_TEXT, _IMAGE = "text", "image_url"


class ImageUrl(msgspec.Struct):
    """Where an image is: a ``data:`` URI, since nothing is fetched."""

    url: str


class Part(Protocol):
    """A piece of a turn."""

    type: str
    text: str
    image_url: ImageUrl | None


class Turn(Protocol):
    """A turn as it was sent."""

    @property
    def role(self) -> str:
        """Whose it is."""
        ...

    @property
    def content(self) -> str | Sequence[Part] | None:
        """A text, or pieces of it with images in between."""
        ...


def conversation(turns: Sequence[Turn]) -> Prompt:
    """Turns in our terms: ``<image>`` stands in a text where an image was.

    Raises:
        RefusedError: a part is of another kind, or an image cannot be used; names the field.
    """
    images: list[bytes] = []
    messages = tuple(_message(turn, index, images) for index, turn in enumerate(turns))
    if not images:
        return messages
    if sum(message.content.count(IMAGE_MARK) for message in messages) != len(images):
        raise RefusedError(
            f"messages: a text holds {IMAGE_MARK}, which stands for an image here; leave it out of "
            "requests with images",
            "messages",
        )
    return ChatWithImages(messages, tuple(images))


def _message(turn: Turn, index: int, images: list[bytes]) -> ChatMessage:
    content = turn.content
    if content is None or isinstance(content, str):
        return ChatMessage(turn.role, content or "")
    place = f"messages[{index}].content"
    texts: list[str] = []
    for number, part in enumerate(content):
        if part.type == _IMAGE:
            images.append(_image(part, f"{place}[{number}]"))
            texts.append(IMAGE_MARK)
        elif part.type == _TEXT:
            texts.append(part.text)
        else:
            raise RefusedError(
                f"{place}: {shortened(part.type)} is not offered; send text or image_url", place
            )
    return ChatMessage(turn.role, "".join(texts))


def _image(part: Part, place: str) -> bytes:
    url = "" if part.image_url is None else part.image_url.url
    if not url.startswith(DATA_URI):
        raise RefusedError(
            f"{place}.image_url: {shortened(url)} is not fetched; send {FORMATS} as "
            "data:image/...;base64,...",
            place,
        )
    try:
        data = image_of_uri(url)
        read_image_header(f"{place}.image_url", data)
    except ValueError as error:
        raise RefusedError(f"{place}.image_url: {error}", place) from error
    except InvalidRequestError as error:
        raise RefusedError(str(error), place) from error
    return data
