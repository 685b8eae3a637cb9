"""Tiny random vision-language models on disk, images, and transformers' own full forward pass."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from sluice.quickstart.tokenizer import VISION_CHAT_TEMPLATE, VISION_TOKENS, save_image_processor

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS)
PAD, TURN_START, EOS, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
VOCABULARY = len(SPECIAL) + 256

_WIDTH = 32
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 200.0, "mrope_section": [2, 3, 3]}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
    },
}
_VISION["qwen3_vl_moe"] = _VISION["qwen3_vl"]
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}


def save_model(
    family: str,
    directory: Path,
    seed: int = 0,
    width: int = _WIDTH,
    deepstack: Sequence[int] = (0,),
    **changes: object,
) -> PreTrainedModel:
    """Writes a whole model folder, and returns the model; its outputs are far from uniform.

    It has two heads, each half as wide as its tokens.

    Args:
        deepstack: blocks of the vision tower whose states the first layers add; of Qwen3-VL.
        changes: of the language model's configuration.
    """
    sections = [size * width // _WIDTH for size in _ROPE["mrope_section"]]
    is_third = family.startswith("qwen3_vl")
    rope = _ROPE | ({"mrope_interleaved": True} if is_third else {})
    text = _TEXT | {"rope_parameters": rope | {"mrope_section": sections}, "hidden_size": width}
    out = "hidden_size" if family == "qwen2_vl" else "out_hidden_size"
    patch = {"patch_size": PATCH[family], "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = AutoConfig.for_model(
        family,
        text_config=text
        | ({"head_dim": width // 2} if is_third else {})
        | (_EXPERTS if family == "qwen3_vl_moe" else {})
        | changes,
        vision_config=_VISION[family]
        | patch
        | {"num_heads": 2, out: width}
        | ({"deepstack_visual_indexes": list(deepstack)} if is_third else {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    scramble(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    side = 2 * PATCH[family]
    save_image_processor(
        directory, patch_size=PATCH[family], min_pixels=side**2, max_pixels=16 * side**2
    )
    return model


def scramble(model: PreTrainedModel, seed: int) -> None:
    """Weights of `seed` under which every part of the model shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                scale = parameter[0].numel() ** -0.5
                parameter.normal_(std=1.5 * scale, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.requires_grad_(requires_grad=False)


def _save_tokenizer(directory: Path) -> None:
    """Each byte a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[EOS]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(VISION_CHAT_TEMPLATE, encoding="utf-8")


def image_file(seed: int, width: int = 56, height: int = 56, kind: str = "PNG") -> bytes:
    """An encoded image of coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind)
    return buffer.getvalue()


class FullForward:
    """Logprobs by transformers alone: its processor, its positions, its attention.

    Args:
        directory: what `save_model` wrote.
        model: of the same folder, or with other weights.
        differentiable: keep what a backward pass needs.
    """

    def __init__(
        self, directory: Path, model: PreTrainedModel, *, differentiable: bool = False
    ) -> None:
        self._grad = differentiable
        self._processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        self._model = model

    def logits(
        self, token_ids: Sequence[int], images: Sequence[bytes], prompt_length: int
    ) -> torch.Tensor:
        """Of every token, [tokens, vocabulary]; images stand in the prompt only."""
        ids = torch.tensor([list(token_ids)])
        inputs: dict[str, Any] = {"input_ids": ids}
        if images:
            decoded = [Image.open(io.BytesIO(one)).convert("RGB") for one in images]
            made = self._processor(images=decoded, return_tensors="pt")
            kinds = (ids == IMAGE).int()
            assert not kinds[0, prompt_length:].any(), "a sampled image token is text"
            inputs |= {**made, "mm_token_type_ids": kinds}
        with torch.set_grad_enabled(self._grad):
            logits: torch.Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logits

    def logprobs_tensor(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        images: Sequence[bytes],
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Of each response token."""
        logits = self.logits([*prompt, *response], images, len(prompt))
        rows = (logits[len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
        return rows[torch.arange(len(response)), torch.tensor(response)]

    def logprobs(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        images: Sequence[bytes],
        temperature: float = 1.0,
    ) -> np.ndarray:
        """Of each response token."""
        found = self.logprobs_tensor(prompt, response, images, temperature)
        sampled: np.ndarray = found.detach().numpy()
        return sampled
