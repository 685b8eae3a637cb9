"""The estimate of activations against what autograd really keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import TrainingLayout, activation_values, training_memory

TOKENS, VOCAB = 128, 64


def kept_bytes(model_type: Any, config_type: Any, layers: int) -> int:
    """Bytes of all tensors kept for the backward pass, weights excepted."""
    config = config_type(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        attn_implementation="sdpa",
    )
    model = model_type(config).to(torch.bfloat16)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False).logits
    logits.sum().backward()
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept.items()
        if address not in weights
    )


@pytest.mark.parametrize(
    ("model_type", "config_type", "qk_norm"),
    [
        (LlamaForCausalLM, LlamaConfig, False),
        (Qwen2ForCausalLM, Qwen2Config, False),
        (Qwen3ForCausalLM, Qwen3Config, True),
    ],
)
def test_a_layer_keeps_what_is_estimated_within_three_percent(
    model_type: Any, config_type: Any, qk_norm: bool
) -> None:
    shape = ModelShape(4, 256, 8, 2, 32, 768, VOCAB, qk_norm=qk_norm)
    # Two more layers: what does not belong to a layer cancels.
    more = kept_bytes(model_type, config_type, 4) - kept_bytes(model_type, config_type, 2)
    layout = TrainingLayout("fsdp", world=1, micro_tokens=TOKENS)
    estimate = training_memory(shape, layout).activations
    assert estimate == 4 * activation_values(shape) * TOKENS * 2
    assert more == pytest.approx(estimate / 2, rel=0.03)
