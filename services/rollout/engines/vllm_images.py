"""A prompt's images as vLLM takes them: each with one placeholder, which vLLM expands by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from services.rollout.engines.protocol import GenerationRequest
from sluice.errors import InvalidRequestError
from sluice.vision.image_files import read_image

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PromptImages", "collapse_images", "read_images"]

_NAME_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """Images of one prompt, in order.

    Attributes:
        prompt: token ids with one placeholder an image.
        expanded_length: of the same prompt with one for each merged patch.
        images: decoded.
        names: the same for the same file.
    """

    prompt: list[int]
    expanded_length: int
    images: tuple[Image, ...]
    names: tuple[str, ...]

    def continued(self, expanded: Sequence[int]) -> list[int]:
        """The prompt and what follows it in `expanded`, where image tokens are only text."""
        return [*self.prompt, *expanded[self.expanded_length :]]


def read_images(request: GenerationRequest, image_token_id: int | None) -> PromptImages | None:
    """The images of a request; ``None`` if it has none.

    Args:
        request: whose prompt holds a placeholder for each merged patch.
        image_token_id: the placeholder; ``None`` for a model that takes no images.

    Raises:
        InvalidRequestError: the model takes none, one cannot be read, or the prompt has not as many
            places as there are images.
    """
    if not request.images:
        return None
    if image_token_id is None:
        raise InvalidRequestError(
            f"request {request.request_id}: {len(request.images)} images for a model that takes "
            "none; serve a vision-language model, or leave them out"
        )
    prompt = collapse_images(request.prompt_token_ids.tolist(), image_token_id, len(request.images))
    images = tuple(
        read_image(encoded, f"images[{number}]") for number, encoded in enumerate(request.images)
    )
    names = tuple(
        hashlib.blake2b(encoded, digest_size=_NAME_BYTES).hexdigest() for encoded in request.images
    )
    return PromptImages(prompt, request.prompt_token_ids.size, images, names)


def collapse_images(token_ids: Sequence[int], image_token_id: int, num_images: int) -> list[int]:
    """`token_ids` with one placeholder in place of each run of them.

    Args:
        token_ids: expanded; other tokens stand between the placeholders of two images.
        image_token_id: the placeholder.
        num_images: that there are.

    Raises:
        InvalidRequestError: there are more or fewer runs.
    """
    collapsed: list[int] = []
    found = 0
    for is_image, run in groupby(token_ids, key=lambda token: token == image_token_id):
        collapsed += [image_token_id] if is_image else run
        found += is_image
    if found != num_images:
        raise InvalidRequestError(
            f"prompt: {num_images} images, but {found} runs of the image token {image_token_id}; "
            "give each image a run of its own, with other tokens between them"
        )
    return collapsed
