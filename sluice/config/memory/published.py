"""Shapes of published models, as in the config.json files of their makers (huggingface.co/Qwen)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sluice.config.memory.shape import ModelShape, shape_of
from sluice.errors import ConfigError

ModelContent = Mapping[str, object]
"""What stands in a config.json."""

_QWEN3_VOCAB, _QWEN25_VOCAB = 151_936, 152_064


def _qwen3(layers: int, hidden: int, heads: int, width: int, **others: object) -> ModelContent:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": width,
        "vocab_size": _QWEN3_VOCAB,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
        **others,
    }


def _qwen3_moe(layers: int, hidden: int, heads: int, width: int, expert: int) -> ModelContent:
    return {
        **_qwen3(layers, hidden, heads, width),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, width: int, **others: object
) -> ModelContent:
    return {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": _QWEN25_VOCAB,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        **others,
    }


_TIED = {"tie_word_embeddings": True}
PUBLISHED: Mapping[str, ModelContent] = MappingProxyType(
    {
        "Qwen2.5-1.5B": _qwen25(28, 1536, 12, 2, 8960, vocab_size=_QWEN3_VOCAB, **_TIED),
        "Qwen2.5-7B": _qwen25(28, 3584, 28, 4, 18_944),
        "Qwen2.5-32B": _qwen25(64, 5120, 40, 8, 27_648),
        "Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, **_TIED),
        "Qwen3-8B": _qwen3(36, 4096, 32, 12_288),
        "Qwen3-32B": _qwen3(64, 5120, 64, 25_600),
        "Qwen3-30B-A3B": _qwen3_moe(48, 2048, 32, 6144, 768),
        "Qwen3-235B-A22B": _qwen3_moe(94, 4096, 64, 12_288, 1536),
        # Its language model; its image encoder is below.
        "Qwen3-VL-30B-A3B": {
            **_qwen3_moe(48, 2048, 32, 6144, 768),
            "max_position_embeddings": 262_144,
        },
    }
)
"""By name, without the suffix of an instruction-tuned model."""

_ENCODERS: Mapping[str, ModelContent] = MappingProxyType(
    {
        "Qwen3-VL-30B-A3B": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "patch_size": 16,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [8, 16, 24],
            "num_position_embeddings": 2304,
        }
    }
)


def published_name(path: str) -> str | None:
    """Return the published model that a path or name ends with; `None`: another one."""
    last = path.rstrip("/").rpartition("/")[2]
    for suffix in ("-Instruct", "-Base", "-Thinking"):
        last = last.removesuffix(suffix)
    return last if last in PUBLISHED else None


def published_model(name: str) -> ModelContent:
    """Return what its config.json says.

    Raises:
        ConfigError: no such model is known; names those that are.
    """
    found = published_name(name)
    if found is None:
        raise ConfigError(
            f"model {name!r} is neither a folder with a config.json nor one of "
            f"{', '.join(PUBLISHED)}; give one of these"
        )
    return PUBLISHED[found]


def published_shape(name: str) -> ModelShape:
    """Return the same as a shape."""
    return shape_of(published_model(name))


def published_encoder(name: str) -> ModelContent:
    """Return the `vision_config` of a published model; empty: it reads no images."""
    return _ENCODERS.get(published_name(name) or "", {})
