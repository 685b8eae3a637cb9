"""Shapes of well-known models, from the config.json files their makers publish."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sluice.config.memory.shape import ModelShape

_QWEN3_VOCAB, _QWEN25_VOCAB = 151_936, 152_064


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        layers,
        hidden,
        heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocab=_QWEN3_VOCAB,
        tied_embeddings=tied,
        qk_norm=True,
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, dense: int, expert: int) -> ModelShape:
    return ModelShape(
        layers,
        hidden,
        heads,
        kv_heads=4,
        head_dim=128,
        intermediate=dense,
        vocab=_QWEN3_VOCAB,
        qk_norm=True,
        experts=128,
        experts_per_token=8,
        expert_intermediate=expert,
    )


def _qwen25(layers: int, hidden: int, heads: int, kv_heads: int, width: int) -> ModelShape:
    return ModelShape(
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim=128,
        intermediate=width,
        vocab=_QWEN25_VOCAB,
        qkv_bias=True,
    )


PUBLISHED_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
        "Qwen3-8B": _qwen3(36, 4096, 32, 12_288, tied=False),
        "Qwen3-32B": _qwen3(64, 5120, 64, 25_600, tied=False),
        "Qwen3-30B-A3B": _qwen3_moe(48, 2048, 32, 6144, 768),
        "Qwen3-235B-A22B": _qwen3_moe(94, 4096, 64, 12_288, 1536),
        "Qwen2.5-7B": _qwen25(28, 3584, 28, 4, 18_944),
        "Qwen2.5-32B": _qwen25(64, 5120, 40, 8, 27_648),
    }
)
