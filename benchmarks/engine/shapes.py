"""The models of `make bench-engine`: random Qwen3 of several sizes, tied embeddings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3. Heads of 64 are the smallest that every engine can run."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; the embedding is also the head."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + norms
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden

    def save_config(self, folder: Path) -> None:
        """Write ``config.json``, which is all that an engine needs of a model before weights."""
        content = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.08,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(1024, 128, 4, heads=2, kv_heads=1, intermediate=192),
    "10m": Shape(16384, 256, 6, heads=4, kv_heads=2, intermediate=896),
}
