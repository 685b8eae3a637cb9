"""Prompts to token ids and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

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
"""Arguments of the template that the encoder itself sets."""
NO_KWARGS: Mapping[str, object] = MappingProxyType({})


class PromptEncoder:
    """The model's tokenizer and chat template.

    Args:
        model_path: directory with the tokenizer.
        template_kwargs: further arguments of the chat template, such as ``enable_thinking``.
        trust_remote_code: run tokenizer code of the checkpoint.

    Raises:
        ConfigError: the directory holds no tokenizer, or `template_kwargs` names an argument that
            the encoder sets.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        template_kwargs: Mapping[str, object] = NO_KWARGS,
        trust_remote_code: bool = False,
    ) -> None:
        self._template_kwargs = _checked(template_kwargs)
        self._tokenizer = _load_tokenizer(model_path, trust_remote_code=trust_remote_code)
        # The wrapper costs several times what the tokenizer itself does on short texts.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            # A tokenizer.json may cut and pad texts; prompts must be neither cut nor padded.
            self._fast.no_truncation()
            self._fast.no_padding()
        self._images = _image_prompts(model_path, trust_remote_code=trust_remote_code)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        images: Sequence[bytes] = (),
        *,
        template_kwargs: Mapping[str, object] = NO_KWARGS,
        add_special_tokens: bool = False,
    ) -> TokenIds:
        """Render the chat template with a generation prompt, and tokenise it: [prompt tokens].

        Args:
            messages: the turns. With images, ``<image>`` in their texts stands for one.
            images: encoded files in the order of these. Each takes as many tokens as the model
                reads it by, which count like any others.
            template_kwargs: override the encoder's.
            add_special_tokens: add those that the tokenizer begins or ends texts with, although the
                template writes its own.

        Raises:
            InvalidRequestError: the template refuses the turns or an argument; the images do not
                fit the model, the texts or the template; or one of them cannot be read.
        """
        self._check_size(sum(len(m.role) + len(m.content) for m in messages))
        arguments = self._template_arguments(template_kwargs)
        if images:
            self._check_images(messages, images)
        turn = _turn_with_images if images else _turn
        text = self._rendered([turn(message) for message in messages], arguments)
        ids = self._tokens(text, add_special_tokens=add_special_tokens)
        return self._images.expand(ids, images) if images and self._images else _some(ids)

    def _check_images(self, messages: Sequence[ChatMessage], images: Sequence[bytes]) -> None:
        if self._images is None:
            raise InvalidRequestError(
                f"images: {len(images)} for a model that reads only text; send none, or serve one "
                f"whose model_type is {', '.join(sorted(FAMILIES))} (actor_rollout_ref.model.path)"
            )
        marks = sum(message.content.count(IMAGE_MARK) for message in messages)
        if marks != len(images):
            raise InvalidRequestError(
                f"images: {len(images)} for {marks} times {IMAGE_MARK} in the texts; write "
                f"{IMAGE_MARK} where each image belongs"
            )

    def _template_arguments(self, given: Mapping[str, object]) -> dict[str, Any]:
        if taken := sorted(OWN_ARGUMENTS & given.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs: {', '.join(taken)} cannot be set, since prompts are always "
                "rendered by the model's template as text that waits for an answer; leave it out"
            )
        return {**self._template_kwargs, **given}

    def _rendered(self, turns: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False, **arguments
            )
        except Exception as error:
            raise InvalidRequestError(
                f"messages: the chat template refused them: {error}"
            ) from error
        return str(text)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Tokenise plain text: [prompt tokens].

        Args:
            text: what the response continues.
            add_special_tokens: add those that the tokenizer begins or ends texts with, such as a
                BOS, as transformers and other servers do by default.

        Raises:
            InvalidRequestError: it has no token, or too many characters.
        """
        return _some(self._tokens(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of response tokens, without special tokens."""
        decoder = self._tokenizer if self._fast is None else self._fast
        return str(decoder.decode(token_ids.tolist(), skip_special_tokens=True))

    def _tokens(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        self._check_size(len(text))
        if self._fast is not None:
            ids = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)

    def _check_size(self, num_characters: int) -> None:
        """Bound the input of rendering and tokenising, which block the event loop."""
        if num_characters > MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(
                f"prompt: {num_characters} characters; send at most {MAX_PROMPT_CHARACTERS}"
            )


def _some(ids: TokenIds) -> TokenIds:
    if ids.size == 0:
        raise InvalidRequestError("prompt: no tokens; send at least one")
    return ids


def _turn(message: ChatMessage) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def _turn_with_images(message: ChatMessage) -> dict[str, Any]:
    """Return the text in parts, as templates of vision-language models expect it."""
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
        return None  # only a tokenizer
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
