"""The models of `make bench-engine`: random Qwen3 of several sizes, tied embeddings."""

from __future__ import annotations

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
MODELS = {"tiny": (1024, 128, 4, 2, 1, 192), "10m": (16384, 256, 6, 4, 2, 896)}


def model_config(name: str) -> dict[str, object]:
    """Return ``config.json``, which is all that an engine needs of a model before weights.

    Heads of 64 are the smallest that every engine can run.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **dict(zip(_SHAPE, MODELS[name], strict=True)),
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.08,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
