"""Prompts to token ids and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from sluice.data.prompt_length import Truncation, fit_prompt
from sluice.errors import ConfigError, InvalidRequestError
from sluice.types import IMAGE_MARK, ChatMessage, TokenIds
from sluice.vision.image_prompts import ImagePromptReader, load_image_prompts
from sluice.vision.vision_shape import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_PROMPT_CHARACTERS = 2_000_000
OWN_ARGUMENTS = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("max_length", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
    )
)
"""Arguments of the template that the encoder itself decides on."""


class PromptEncoder:
    """Renders and tokenises prompts; decodes responses.

    Args:
        model_path: directory with the tokenizer.
        max_prompt_length: tokens a prompt may have.
        truncation: what to do with a longer one (`sluice.data.prompt_length.fit_prompt`).
        filter_overlong: refuse a longer one whatever `truncation` says, so that whoever sent it
            can leave it out.
        template_kwargs: further arguments of the chat template, as ``enable_thinking``.
        trust_remote_code: run tokenizer code of the checkpoint.

    Raises:
        ConfigError: the directory holds no tokenizer, or `template_kwargs` names an argument that
            is not for users.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        max_prompt_length: int,
        truncation: Truncation,
        filter_overlong: bool = False,
        template_kwargs: Mapping[str, object] = MappingProxyType({}),
        trust_remote_code: bool = False,
    ) -> None:
        self._max_prompt_length = max_prompt_length
        self._truncation: Truncation = "error" if filter_overlong else truncation
        self._template_kwargs = _checked(template_kwargs)
        self._tokenizer = _load_tokenizer(model_path, trust_remote_code=trust_remote_code)
        # The wrapper costs several times what the tokenizer itself does on short texts.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        self._images = _image_prompts(model_path, trust_remote_code=trust_remote_code)

    def encode_chat(
        self, messages: Sequence[ChatMessage], images: Sequence[bytes] = ()
    ) -> TokenIds:
        """Chat template with a generation prompt, tokenised: [prompt tokens].

        Args:
            messages: the turns. ``<image>`` in their texts stands for an image, if there are any.
            images: encoded files in the order of these. Each takes as many tokens as the model
                reads of it, which count like any others. A prompt with images is never cut.

        Raises:
            PromptTooLongError: the prompt is over the limit and is not to be cut.
            InvalidRequestError: the template refuses the turns; or the images do not fit the model,
                the texts or the template, or one of them cannot be read.
        """
        self._check_size(sum(len(m.role) + len(m.content) for m in messages))
        if images:
            return self._encode_with_images(messages, images)
        return self.encode_text(self._rendered([_turn(message) for message in messages]))

    def _encode_with_images(
        self, messages: Sequence[ChatMessage], images: Sequence[bytes]
    ) -> TokenIds:
        if self._images is None:
            raise InvalidRequestError(
                f"images: {len(images)} for a model that reads text alone; send none, or serve one "
                f"whose model_type is {', '.join(sorted(FAMILIES))} (actor_rollout_ref.model.path)"
            )
        marks = sum(message.content.count(IMAGE_MARK) for message in messages)
        if marks != len(images):
            raise InvalidRequestError(
                f"images: {len(images)} for {marks} times {IMAGE_MARK} in the texts; write "
                f"{IMAGE_MARK} where each image belongs"
            )
        text = self._rendered([_turn_with_images(message) for message in messages])
        ids = self._images.expand(self._tokens(text), images)
        return fit_prompt(ids, self._max_prompt_length, "error")

    def _rendered(self, turns: list[dict[str, Any]]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False, **self._template_kwargs
            )
        except Exception as error:
            raise InvalidRequestError(
                f"messages: the chat template refused them: {error}"
            ) from error
        return str(text)

    def encode_text(self, text: str) -> TokenIds:
        """Plain text tokenised as it stands: [prompt tokens].

        Raises:
            PromptTooLongError: the prompt is over the limit and is not to be cut.
            InvalidRequestError: it has no token, or too many characters.
        """
        return self._limited(self._tokens(text))

    def decode(self, token_ids: TokenIds) -> str:
        """The text of response tokens, special tokens left out."""
        decoder = self._tokenizer if self._fast is None else self._fast
        return str(decoder.decode(token_ids.tolist(), skip_special_tokens=True))

    def _tokens(self, text: str) -> TokenIds:
        self._check_size(len(text))
        if self._fast is not None:
            ids = self._fast.encode(text, add_special_tokens=False).ids
        else:
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)

    def _check_size(self, num_characters: int) -> None:
        """Rendering and tokenising block the event loop, so their input is bounded first."""
        if num_characters > MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(
                f"prompt: {num_characters} characters; send at most {MAX_PROMPT_CHARACTERS}"
            )

    def _limited(self, ids: TokenIds) -> TokenIds:
        if ids.size == 0:
            raise InvalidRequestError("prompt: no tokens; send at least one")
        return fit_prompt(ids, self._max_prompt_length, self._truncation)


def _turn(message: ChatMessage) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def _turn_with_images(message: ChatMessage) -> dict[str, Any]:
    """The text in parts, as chat templates of vision-language models read it."""
    texts = message.content.split(IMAGE_MARK)
    if len(texts) == 1:
        return _turn(message)
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {"role": message.role, "content": parts}


def _image_prompts(model_path: Path, *, trust_remote_code: bool) -> ImagePromptReader | None:
    if not (model_path / "config.json").is_file():
        return None  # a tokenizer alone
    return load_image_prompts(model_path, trust_remote_code=trust_remote_code)


def _checked(template_kwargs: Mapping[str, object]) -> dict[str, Any]:
    if taken := sorted(OWN_ARGUMENTS & template_kwargs.keys()):
        raise ConfigError(
            f"data.apply_chat_template_kwargs: {', '.join(taken)} cannot be set, since prompts are "
            "always rendered as text that waits for an answer; leave it out"
        )
    return dict(template_kwargs)


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
