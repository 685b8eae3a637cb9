"""Limits of prompts: data.max_prompt_length for training, the model's context for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sluice.errors import InvalidRequestError, PromptTooLongError, SequenceTooLongError
from sluice.types import TokenIds

Truncation = Literal["error", "left", "right", "middle"]


def fit_prompt(ids: TokenIds, limit: int, truncation: Truncation) -> TokenIds:
    """Return at most `limit` tokens of a prompt: [min(tokens, limit)].

    ``left`` cuts the beginning and keeps the last `limit` tokens, ``right`` keeps the first, and
    ``middle`` the first ``limit // 2`` and the last ``limit - limit // 2`` (verl 0.6).

    Raises:
        PromptTooLongError: the prompt is longer, and `truncation` is ``error``.
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


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The rules for long prompts of the training data.

    Args:
        max_prompt_length: most tokens of a prompt.
        truncation: see `fit_prompt`.
        filter_overlong: refuse a longer one under every `truncation`, so that its sender
            can leave it out.
    """

    max_prompt_length: int
    truncation: Truncation
    filter_overlong: bool = False

    def fit(self, ids: TokenIds, *, has_images: bool = False) -> TokenIds:
        """Return the prompt as it is trained on. One with images is never cut.

        Raises:
            PromptTooLongError: the prompt is over the limit and must not be cut.
        """
        is_whole = self.filter_overlong or has_images
        return fit_prompt(ids, self.max_prompt_length, "error" if is_whole else self.truncation)


def check_context(num_tokens: int, max_model_len: int) -> None:
    """Check that a prompt leaves space for one token of the response.

    Raises:
        InvalidRequestError: it does not.
    """
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"prompt: {num_tokens} tokens; the model's context of {max_model_len} takes "
            f"{max_model_len - 1} and one of the response: shorten the prompt, or have the run "
            "started with a greater actor_rollout_ref.rollout.max_model_len"
        )


def check_sequence(num_tokens: int, max_tokens: int) -> None:
    """Check that a conversation leaves space for one more token.

    Raises:
        SequenceTooLongError: it does not.
    """
    if num_tokens >= max_tokens:
        raise SequenceTooLongError(
            f"prompt: {num_tokens} tokens; max_sequence_tokens, or the model's context, allows "
            f"{max_tokens} with the response: end the conversation"
        )
