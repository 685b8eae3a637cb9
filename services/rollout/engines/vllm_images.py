"""A prompt's images as vLLM takes them: each with one placeholder, which vLLM expands by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from services.rollout.engines.protocol import GenerationRequest
from sluice.errors import InvalidRequestError
from sluice.vision.image_prompts import ImagePromptReader

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
        images: decoded, in the sizes that the model's processor leaves as they are.
        names: the same for the same file.
    """

    prompt: list[int]
    expanded_length: int
    images: tuple[Image, ...]
    names: tuple[str, ...]

    def continued(self, expanded: Sequence[int]) -> list[int]:
        """The prompt and what follows it in `expanded`, where image tokens are only text."""
        return [*self.prompt, *expanded[self.expanded_length :]]


def read_images(
    request: GenerationRequest, reader: ImagePromptReader | None
) -> PromptImages | None:
    """The images of a request; ``None`` if it has none.

    vLLM resizes by torchvision, which rounds unlike the trainer's Pillow: it is given images that
    it need not resize.

    Args:
        request: whose prompt holds a placeholder for each merged patch.
        reader: of the model; ``None``: it takes no images.

    Raises:
        InvalidRequestError: the model takes none, one cannot be read or resized, or the prompt has
            not as many places as there are images.
    """
    if not request.images:
        return None
    if reader is None:
        raise InvalidRequestError(
            f"request {request.request_id}: {len(request.images)} images for a model that takes "
            "none; serve a vision-language model, or leave them out"
        )
    token_ids, image_token_id = request.prompt_token_ids.tolist(), reader.shape.image_token_id
    prompt = collapse_images(token_ids, image_token_id, len(request.images))
    images = tuple(reader.fitted(encoded, number) for number, encoded in enumerate(request.images))
    names = tuple(
        hashlib.blake2b(encoded, digest_size=_NAME_BYTES).hexdigest() for encoded in request.images
    )
    return PromptImages(prompt, len(token_ids), images, names)


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
