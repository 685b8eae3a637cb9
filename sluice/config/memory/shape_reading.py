"""Reads a model's shape from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sluice.config.memory.model_shape import ModelShape
from sluice.config.memory.published_shapes import PUBLISHED_SHAPES, published_shape
from sluice.errors import ConfigError


def find_shape(model_path: str, config_file: Path | None) -> ModelShape | None:
    """The shape from `config_file`, else from the model's own folder, else by the model's name.

    Raises:
        ConfigError: a file is there but describes no such model.
    """
    if config_file is not None:
        return read_shape(config_file)
    local = Path(model_path) / "config.json"
    if model_path and local.is_file():
        return read_shape(local)
    return published_shape(model_path)


def unknown_shape(model_path: str) -> str:
    """The sentence for a model whose shape is not known here."""
    return (
        f"actor_rollout_ref.model.path = {model_path!r} holds no config.json here and is none of "
        f"the models known by name ({', '.join(PUBLISHED_SHAPES)}); give its config.json with "
        "--model-config FILE for the estimate of memory"
    )


def read_shape(file: Path) -> ModelShape:
    """Reads a config.json.

    Raises:
        ConfigError: naming the file and what it lacks.
    """
    try:
        content = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model configuration {file}: {error}; give a config.json") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model configuration {file}: holds no JSON object; give a config.json")
    text = content.get("text_config")  # vision models keep their language model here
    own = {**content, **text} if isinstance(text, dict) else content
    try:
        return shape_of(own)
    except ConfigError as error:
        raise ConfigError(f"model configuration {file}: {error}") from error


def shape_of(config: Mapping[str, object]) -> ModelShape:
    """The shape a config.json describes.

    Raises:
        ConfigError: a size is missing, or attention is of a kind that is not estimated.
    """
    if "kv_lora_rank" in config:
        raise ConfigError("multi-head latent attention (kv_lora_rank) is not estimated")
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    kind = str(config.get("model_type", ""))
    experts = _size(config, "num_experts", _size(config, "num_local_experts", 0))
    dense_layers = config.get("mlp_only_layers")
    width = _size(config, "intermediate_size")
    return ModelShape(
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        intermediate=width,
        vocab=_size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind.startswith("qwen2") or bool(config.get("attention_bias")),
        qk_norm=kind.startswith("qwen3"),
        experts=experts,
        experts_per_token=_size(config, "num_experts_per_tok", 0) if experts else 0,
        expert_intermediate=_size(config, "moe_intermediate_size", width) if experts else 0,
        shared_intermediate=_size(config, "shared_expert_intermediate_size", 0) if experts else 0,
        dense_layers=len(dense_layers) if experts and isinstance(dense_layers, list) else 0,
    )


def _size(config: Mapping[str, object], key: str, otherwise: int | None = None) -> int:
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{key} = {value!r}: expected a whole number")
    if otherwise is None and value == 0:
        raise ConfigError(f"{key} = 0: expected a size of at least 1")
    return value
