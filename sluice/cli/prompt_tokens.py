"""Counts the tokens of prompts with a model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sluice.data.inspection import MeasureTokens
from sluice.errors import ConfigError, DataError
from sluice.types import ChatMessage


def token_counter(folder: Path) -> MeasureTokens:
    """A function from messages to tokens, a generation prompt included, as the rollout counts.

    Args:
        folder: a model or tokenizer directory.

    Raises:
        ConfigError: it holds no tokenizer, or one without a chat template, or transformers is not
            installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "--tokenizer: transformers is not installed; pip install 'sluice[torch]'"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--tokenizer: {folder} holds no tokenizer ({error}); give a model directory"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(f"--tokenizer: {folder} has no chat template; give a chat model's")

    def count(messages: Sequence[ChatMessage]) -> int:
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise DataError(f"the chat template refused the messages: {error}") from error
        return len(tokenizer(str(text), add_special_tokens=False)["input_ids"])

    return count
