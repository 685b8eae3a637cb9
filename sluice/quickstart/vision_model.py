"""The model of the task with pictures: a small Qwen2.5-VL with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from sluice.quickstart.shape_pictures import SIDE_PIXELS
from sluice.quickstart.tokenizer import PAD_TOKEN, TURN_END
from sluice.quickstart.vision_tokens import (
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    save_image_processor,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_POSITIONS = 256
PATCH_PIXELS = 8
_WIDTH = 64
_READABLE = 0o644


def make_config(tokenizer: Tokenizer) -> Qwen2_5_VLConfig:
    """Two layers of width 64 behind one of a vision tower, tied embeddings, float32.

    Heads of 32 in the text layers are the smallest that vLLM's attention takes on a CPU.
    """
    vocabulary = tokenizer.get_vocab()
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": _WIDTH,
        "intermediate_size": 3 * _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 200.0,
            "mrope_section": [4, 6, 6],
        },
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": vocabulary[TURN_END],
        "pad_token_id": vocabulary[PAD_TOKEN],
    }
    vision = {
        "depth": 1,
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_heads": 4,
        "out_hidden_size": _WIDTH,
        "patch_size": PATCH_PIXELS,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 2 * SIDE_PIXELS,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.08,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=vocabulary[IMAGE_PAD],
        video_token_id=vocabulary[VIDEO_PAD],
        vision_start_token_id=vocabulary[VISION_START],
        vision_end_token_id=vocabulary[VISION_END],
        tie_word_embeddings=True,
        dtype="float32",
    )


def make_model(tokenizer: Tokenizer, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A model with random weights from `seed`; the global random state is left as it was."""
    config = make_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(PAD_TOKEN),
        do_sample=True,
    )
    return model


def save_processor(directory: Path) -> None:
    """The image processor of the model; pictures keep their size."""
    directory.mkdir(parents=True, exist_ok=True)
    pixels = SIDE_PIXELS**2
    save_image_processor(directory, patch_size=PATCH_PIXELS, min_pixels=pixels, max_pixels=pixels)


def save_model(model: Qwen2_5_VLForConditionalGeneration, directory: Path) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors`."""
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        transformers_logging.enable_progress_bar()
    for file in directory.glob("*.safetensors"):
        file.chmod(_READABLE)  # safetensors lets only the owner read them
