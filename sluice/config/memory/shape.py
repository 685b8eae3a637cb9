"""The shape of a decoder-only model and of its image encoder: the sizes that decide their memory,
from config.json or, of a published model, from `published.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from sluice.errors import ConfigError
from sluice.types import expert_dtype

ModelContent = Mapping[str, object]
"""What stands in a config.json."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_ENCODER = "vision_config"
_ADAPTABLE_EXPERTS = frozenset({"qwen3_moe", "qwen3_vl_moe"})
_CHANNELS, _FLOAT = 3, 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated (three-matrix) MLPs.

    Args:
        intermediate: width of a dense layer's MLP.
        experts: routed experts of a mixture-of-experts layer; 0 for a dense model.
        expert_intermediate: width of one routed expert.
        shared_intermediate: width of the expert that every token passes; 0 without one.
        dense_layers: layers of a mixture-of-experts model with a dense MLP.
        context: most tokens of prompt and response, by its positions and their scaling; ``None``:
            not stated.
        qkv_bias: query, key and value projections have biases (Qwen2, Qwen2.5).
        qk_norm: queries and keys are normalised per head (Qwen3).
        adaptable_experts: the trainer has own experts for the family, which take adapters.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    context: int | None = None
    adaptable_experts: bool = False

    @property
    def query_width(self) -> int:
        """Values of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of all key heads, or of all value heads, of one token."""
        return self.kv_heads * self.head_dim

    @property
    def expert_bytes_per_token(self) -> int:
        """Bytes of the numbers of all experts that a token gets (`RoutedExperts`)."""
        if not self.experts:
            return 0
        return self.expert_layers * self.experts_per_token * expert_dtype(self.experts).itemsize

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        """One vocabulary matrix."""
        return self.vocab * self.hidden

    @property
    def vocabulary_parameters(self) -> int:
        """Embedding and language-model head; one matrix where they are tied."""
        return self.embedding_parameters * (1 if self.tied_embeddings else 2)

    @property
    def attention_parameters(self) -> int:
        """Attention and both norms of one layer: q and o are h·Hd, k and v are h·KVd."""
        projections = 2 * self.hidden * (self.query_width + self.kv_width)
        biases = self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return projections + biases + norms

    @property
    def expert_parameters(self) -> int:
        """All routed experts of the whole model: gate, up and down of each."""
        return self.expert_layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def total_parameters(self) -> int:
        """All parameters."""
        return self.vocabulary_parameters + self.dense_parameters + self.expert_parameters

    @property
    def dense_parameters(self) -> int:
        """Everything but vocabulary matrices and routed experts."""
        per_expert_layer = self.hidden * (self.experts + 3 * self.shared_intermediate)
        mlps = 3 * self.hidden * self.intermediate * (self.layers - self.expert_layers)
        mlps += self.expert_layers * per_expert_layer
        return self.layers * self.attention_parameters + mlps + self.hidden

    def adapter_parameters(self, rank: int, *, experts: bool) -> int:
        """Return the parameters of adapters of all linear layers but the head.

        Args:
            rank: of the adapters.
            experts: those of experts too, if the family's take any.
        """
        query, keys = self.hidden + self.query_width, self.hidden + self.kv_width
        mlps = 3 * (self.hidden + self.intermediate) * (self.layers - self.expert_layers)
        if self.shared_intermediate:
            mlps += 3 * (self.hidden + self.shared_intermediate) * self.expert_layers
        if experts and self.adaptable_experts:
            per_expert = 3 * (self.hidden + self.expert_intermediate)
            mlps += per_expert * self.experts * self.expert_layers
        return rank * (2 * (query + keys) * self.layers + mlps)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through."""
        if not self.experts:
            return self.total_parameters
        routed = self.expert_parameters * self.experts_per_token // self.experts
        return self.vocabulary_parameters + self.dense_parameters + routed

    def training_flops(self, tokens: float, labels: float, pairs: float) -> float:
        """Return floating-point operations of a forward and a backward pass, without recomputing.

        Six for each weight that a token is multiplied with, and in each layer twelve for each value
        of the query heads of a token, for every token that it sees (Narayanan et al. 2021, with
        causal attention). Norms count as if they were products.

        Args:
            tokens: inputs of the layers.
            labels: tokens of the head.
            pairs: of a token and one that it sees, itself included; see `causal_pairs`.
        """
        body = self.active_parameters - self.vocabulary_parameters
        attention = 2 * self.layers * self.query_width * pairs
        return 6.0 * (body * tokens + self.embedding_parameters * labels + attention)

    @property
    def mlp_width(self) -> int:
        """MLP values of one token in the widest kind of layer."""
        if not self.expert_layers:
            return self.intermediate
        return self.experts_per_token * self.expert_intermediate + self.shared_intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer on average, the unit that sharded training gathers."""
        all_layers = self.dense_parameters - self.hidden + self.expert_parameters
        return all_layers // self.layers


def causal_pairs(tokens: float) -> float:
    """Return the pairs of a row's tokens and those that each sees, itself included."""
    return tokens * (tokens + 1) / 2


def find_shape(model_path: str) -> ModelShape | None:
    """Return the shape from a model's folder; ``None``: it holds no decoder of a known kind.

    What is wrong with the folder is reported by the check of its files.
    """
    local = Path(model_path) / "config.json"
    if not (model_path and local.is_file()):
        return None
    try:
        return read_shape(local)
    except ConfigError:
        return None


def read_shape(file: Path) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises:
        ConfigError: naming the file and what it lacks.
    """
    return read_model(file)[1]


def read_model(file: Path) -> tuple[dict[str, object], ModelShape]:
    """Return the content of a config.json, a vision model's language model on top, and its shape.

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
    language_model = {**content, **text} if isinstance(text, dict) else content
    try:
        return language_model, shape_of(language_model)
    except ConfigError as error:
        raise ConfigError(f"model configuration {file}: {error}") from error


def shape_of(config: Mapping[str, object]) -> ModelShape:
    """Return the shape that the content of a config.json describes.

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
        context=_context_length(config),
        adaptable_experts=kind.removesuffix("_text") in _ADAPTABLE_EXPERTS,
    )


def _context_length(config: Mapping[str, object]) -> int | None:
    """Return the positions, or those that a scaling (yarn, linear, dynamic, llama3) makes of the
    original ones; some models state the one number, some the other."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return positions
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if not isinstance(factor, int | float):
        return positions
    return max(positions, int((original if isinstance(original, int) else positions) * factor))


def _size(config: Mapping[str, object], key: str, otherwise: int | None = None) -> int:
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{key} = {value!r}: expected a whole number")
    if otherwise is None and value == 0:
        raise ConfigError(f"{key} = 0: expected a size of at least 1")
    return value


def published_name(path: str) -> str | None:
    """Return the published model that a path or name ends with; `None`: another one."""
    name = path.rstrip("/").rpartition("/")[2]
    for suffix in ("-Instruct", "-Base", "-Thinking"):
        name = name.removesuffix(suffix)
    return name if name in _models() else None


def published_model(name: str) -> ModelContent:
    """Return what its config.json says of the language model.

    Raises:
        ConfigError: no such model is known; names those that are.
    """
    full_name = published_name(name)
    if full_name is None:
        raise ConfigError(
            f"model {name!r} is neither a folder with a config.json nor one of "
            f"{', '.join(_models())}; give one of these"
        )
    return {key: value for key, value in _models()[full_name].items() if key != _ENCODER}


def published_shape(name: str) -> ModelShape:
    """Return the same as a shape."""
    return shape_of(published_model(name))


def published_encoder(name: str) -> ModelContent:
    """Return the `vision_config` of a published model; empty: it reads no images."""
    encoder: ModelContent = _models().get(published_name(name) or "", {}).get(_ENCODER, {})
    return encoder


@cache
def _models() -> dict[str, dict[str, Any]]:
    file = resources.files(__package__).joinpath("published.toml")
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    families = content.pop("family")
    return {
        name: {**families[family], **fields}
        for family, models in content.items()
        for name, fields in models.items()
    }


@dataclass(frozen=True, slots=True)
class ImageEncoder:
    """The sizes of the vision tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL.

    Attributes:
        layers: transformer blocks.
        width: of a patch's hidden state.
        inner: width inside a block's perceptron.
        projections: matrices of the perceptron; 3 if it has a gate.
        merged: patches that become one token.
        numbers: of a patch's pixels.
        out: width of the language model.
        mergers: of the last block and of those whose states deeper layers add.
        positions: learned ones.
    """

    layers: int
    width: int
    inner: int
    projections: int
    merged: int
    numbers: int
    out: int
    mergers: int = 1
    positions: int = 0

    @property
    def parameters(self) -> int:
        """Weights, without norms and biases."""
        block = 4 * self.width**2 + self.projections * self.width * self.inner
        joined = self.merged * self.width
        ends = self.width * (self.numbers + self.positions)
        return self.layers * block + ends + self.mergers * joined * (joined + self.out)

    @property
    def pixel_bytes(self) -> int:
        """Of the pixels of one token."""
        return self.merged * self.numbers * _FLOAT

    def saved_bytes(self, *, recomputes: bool, dtype_bytes: int) -> float:
        """Return the bytes that one token leaves for the backward pass.

        A block keeps the inputs of its norms, projections and attention, without dropout
        (Korthikanti et al. 2022, section 4.1); if it is recomputed, its own input, and one block
        has all of them at a time.
        """
        block = 8 * self.width + self.projections * self.inner
        numbers = self.layers * self.width + block if recomputes else self.layers * block
        return float(self.merged * numbers * dtype_bytes)


def image_encoder(vision: Mapping[str, object]) -> ImageEncoder | None:
    """Return the encoder that the `vision_config` of a config.json describes.

    Returns:
        `None` for one of another family.
    """
    sizes = {name: size for name, size in vision.items() if isinstance(size, int)}
    try:
        # In Qwen2-VL `hidden_size` is the language model's.
        is_first = "embed_dim" in sizes
        width = sizes["embed_dim" if is_first else "hidden_size"]
        ratio = vision.get("mlp_ratio", 4)
        inner = int(width * ratio) if is_first and isinstance(ratio, int | float) else 0
        deeper = vision.get("deepstack_visual_indexes")
        return ImageEncoder(
            layers=sizes["depth"],
            width=width,
            inner=inner or sizes["intermediate_size"],
            projections=3 if "fullatt_block_indexes" in vision else 2,
            merged=sizes.get("spatial_merge_size", 2) ** 2,
            numbers=_CHANNELS * sizes.get("temporal_patch_size", 2) * sizes["patch_size"] ** 2,
            out=sizes["hidden_size" if is_first else "out_hidden_size"],
            mergers=1 + (len(deeper) if isinstance(deeper, list) else 0),
            positions=sizes.get("num_position_embeddings", 0),
        )
    except KeyError:
        return None
