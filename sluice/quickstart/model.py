"""The quickstart model: a Qwen3 of about 122,000 parameters with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from sluice.quickstart.tokenizer import PAD_TOKEN, TURN_END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_POSITIONS = 512


def make_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Two layers of width 64, four heads of 16 over two KV heads, tied embeddings, float32."""
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        # Contexts are short: slower frequencies would turn too little over them to tell places
        # apart, and finding the next operand is what the warm start learns last.
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
        # Small models start faster from larger weights than the 0.02 usual at scale.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(PAD_TOKEN),
        dtype="float32",
    )


def make_model(tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """A model with random weights from `seed`; the global random state is left as it was."""
    config = make_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    return model


def save_model(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors`.

    Written here rather than by `save_pretrained`, which draws a progress bar over the console and
    leaves the weights readable by their owner alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    # The output layer is the embedding matrix (tied) and is stored once, under that name.
    weights = {
        name: weight.detach().contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
