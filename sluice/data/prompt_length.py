"""A prompt's place in data.max_prompt_length: cut to it, or refused with its numbers."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sluice.errors import PromptTooLongError
from sluice.types import TokenIds

Truncation = Literal["error", "left", "right", "middle"]


def fit_prompt(ids: TokenIds, limit: int, truncation: Truncation) -> TokenIds:
    """At most `limit` tokens of a prompt: [min(tokens, limit)].

    ``left`` cuts the beginning and keeps the last `limit` tokens, ``right`` keeps the first, and
    ``middle`` the first ``limit // 2`` and the last ``limit - limit // 2`` (verl 0.6).

    Raises:
        PromptTooLongError: it is longer, and `truncation` is ``error``.
    """
    if ids.size <= limit:
        return ids
    match truncation:
        case "left":
            return ids[ids.size - limit :]
        case "right":
            return ids[:limit]
        case "middle":
            head = limit // 2
            return np.concatenate([ids[:head], ids[ids.size - (limit - head) :]])
        case _:
            raise PromptTooLongError.of(int(ids.size), limit)
