"""Parameter counts from config.json against models that Transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sluice.config.memory.shape import read_shape

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        ("qwen3_moe", {"head_dim": 32, **EXPERTS}),
        ("qwen3_moe", {"head_dim": 32, "mlp_only_layers": [1], **EXPERTS}),
        ("mixtral", {"num_local_experts": 4}),
    ],
)
def test_parameters_are_counted_as_transformers_builds_them(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(kind, **SIZES, **more)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(tmp_path / "config.json")
    assert shape.total_parameters == sum(weight.numel() for weight in model.parameters())
