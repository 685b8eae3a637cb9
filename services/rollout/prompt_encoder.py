"""Prompts to token ids and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sluice.errors import ConfigError, InvalidRequestError
from sluice.types import ChatMessage, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_PROMPT_CHARACTERS = 2_000_000


class PromptEncoder:
    """Renders and tokenises prompts; decodes responses.

    Args:
        model_path: directory with the tokenizer.
        max_prompt_length: tokens a prompt may have.
        truncation: what to do with a longer one: ``error``, ``left``, ``right`` or ``middle``
            (which side is cut off).
        trust_remote_code: run tokenizer code of the checkpoint.

    Raises:
        ConfigError: the directory holds no tokenizer.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        max_prompt_length: int,
        truncation: str,
        trust_remote_code: bool = False,
    ) -> None:
        self._max_prompt_length = max_prompt_length
        self._truncation = truncation
        self._tokenizer = _load_tokenizer(model_path, trust_remote_code=trust_remote_code)
        # The wrapper costs several times what the tokenizer itself does on short texts.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> TokenIds:
        """Chat template with a generation prompt, tokenised: [prompt tokens].

        Raises:
            InvalidRequestError: the template refuses the turns, or the prompt is too long.
        """
        self._check_size(sum(len(m.content) for m in messages))
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            raise InvalidRequestError(
                f"messages: the chat template refused them: {error}"
            ) from error
        return self.encode_text(str(text))

    def encode_text(self, text: str) -> TokenIds:
        """Plain text tokenised as it stands: [prompt tokens]."""
        self._check_size(len(text))
        if self._fast is not None:
            ids = self._fast.encode(text, add_special_tokens=False).ids
        else:
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._limited(np.asarray(ids, dtype=np.uint32))

    def decode(self, token_ids: TokenIds) -> str:
        """The text of response tokens, special tokens left out."""
        decoder = self._tokenizer if self._fast is None else self._fast
        return str(decoder.decode(token_ids.tolist(), skip_special_tokens=True))

    def _check_size(self, num_characters: int) -> None:
        """Rendering and tokenising block the event loop, so their input is bounded first."""
        if num_characters > MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(
                f"prompt: {num_characters} characters; send at most {MAX_PROMPT_CHARACTERS}"
            )

    def _limited(self, ids: TokenIds) -> TokenIds:
        limit = self._max_prompt_length
        if ids.size == 0:
            raise InvalidRequestError("prompt: no tokens; send at least one")
        if ids.size <= limit:
            return ids
        match self._truncation:
            case "left":
                return ids[-limit:]
            case "right":
                return ids[:limit]
            case "middle":
                return np.concatenate([ids[: limit // 2], ids[ids.size - (limit - limit // 2) :]])
            case _:
                raise InvalidRequestError(
                    f"prompt: {ids.size} tokens exceed data.max_prompt_length={limit}; shorten it, "
                    "raise the limit, or set data.truncation to left, right or middle"
                )


def _load_tokenizer(model_path: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(model_path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path: {model_path} holds no tokenizer ({error}); "
            "point it at a Hugging Face model directory"
        ) from error
