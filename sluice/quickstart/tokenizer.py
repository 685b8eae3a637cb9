"""The quickstart's tokenizer: byte-level BPE with one token per digit, and tokens for images."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.quickstart.arithmetic import Dialogue

PAD_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)

VISION_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# The dialogues hold few different words, so training runs out of pairs far below this bound.
MAX_VOCABULARY = 512


def render_prompt(question: str) -> str:
    """Return one user message with the generation prompt, as the chat template renders it."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def train_tokenizer(dialogues: Iterable[Dialogue]) -> Tokenizer:
    """Train a tokenizer on dialogues."""
    return train_on_texts(render_prompt(d.problem.question) + d.answer for d in dialogues)


def train_on_texts(texts: Iterable[str], more_special: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE: any text round-trips, and ``17`` is always ``1`` and ``7``.

    Args:
        texts: texts that should take few tokens.
        more_special: further special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD_TOKEN, TURN_START, TURN_END, *more_special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, directory: Path, max_tokens: int, chat_template: str = CHAT_TEMPLATE
) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

    Args:
        max_tokens: the model's context length, for users of the directory.
        chat_template: in Jinja.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "eos_token": TURN_END,
        "pad_token": PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    config_text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(config_text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def save_image_processor(
    directory: Path, *, patch_size: int, min_pixels: int, max_pixels: int
) -> None:
    """Write `preprocessor_config.json` for images that are scaled to between two sizes.

    Args:
        directory: the model's folder.
        patch_size: side of a patch in pixels; two by two patches become one token.
        min_pixels: smaller images are enlarged to it.
        max_pixels: larger images are reduced to it.
    """
    config: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "preprocessor_config.json").write_text(text, encoding="utf-8")
