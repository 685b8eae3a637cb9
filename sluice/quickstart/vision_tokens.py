"""The tokens and the chat template by which a prompt shows images, named as Qwen's models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
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


def save_image_processor(
    directory: Path, *, patch_size: int, min_pixels: int, max_pixels: int
) -> None:
    """Writes `preprocessor_config.json` for images that are scaled into the two bounds.

    Args:
        directory: the model's.
        patch_size: side of a patch in pixels; two by two of them become one token.
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
