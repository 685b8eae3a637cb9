"""From one placeholder token an image to one token for each of its merged patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sluice.errors import InvalidRequestError
from sluice.types import TokenIds

__all__ = ["expand_placeholders"]


def expand_placeholders(
    token_ids: TokenIds, image_token_id: int, num_tokens: Sequence[int]
) -> TokenIds:
    """`token_ids` with the i-th `image_token_id` repeated ``num_tokens[i]`` times.

    Raises:
        InvalidRequestError: there are not as many of them as images.
    """
    is_image = token_ids == image_token_id
    found = int(is_image.sum())
    if found != len(num_tokens):
        raise InvalidRequestError(
            f"prompt: {len(num_tokens)} images, but {found} places for them after the chat "
            "template; use a template that shows images, and leave the model's own image tokens "
            "out of the text"
        )
    repeats = np.ones(token_ids.size, dtype=np.int64)
    repeats[is_image] = num_tokens
    return np.repeat(token_ids, repeats)
