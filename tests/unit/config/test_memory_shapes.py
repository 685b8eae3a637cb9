"""Shapes of models: parameter counts, reading them from config.json, finding them by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.config.memory.shape import find_shape, published_shape, read_shape
from sluice.errors import ConfigError

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
}


def write(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    content = {key: value for key, value in {**TINY, **changes}.items() if value != "left out"}
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-0.6B", 0.6, 0.6),
        ("Qwen3-8B", 8.2, 8.2),
        ("Qwen3-32B", 32.8, 32.8),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen3-235B-A22B", 235.0, 22.0),
        ("Qwen2.5-7B", 7.61, 7.61),
        ("Qwen2.5-32B", 32.5, 32.5),
    ],
)
def test_parameters_are_within_two_percent_of_the_published_totals(
    name: str, billions: float, active: float
) -> None:
    shape = published_shape(name)
    assert shape.total_parameters == pytest.approx(billions * 1e9, rel=0.02)
    assert shape.active_parameters == pytest.approx(active * 1e9, rel=0.02)


def test_a_dense_model_is_counted_by_hand(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path))
    # q, o: 8·8; k, v: 8·4; two norms of 8; gate, up, down: 8·16.
    assert shape.attention_parameters == 2 * 64 + 2 * 32 + 16
    assert shape.dense_parameters == 2 * (208 + 384) + 8
    assert shape.total_parameters == 1192 + 2 * 32 * 8


def test_biases_norms_of_heads_and_tied_embeddings_count(tmp_path: Path) -> None:
    plain = read_shape(write(tmp_path)).total_parameters
    biased = read_shape(write(tmp_path, model_type="qwen2")).total_parameters
    normed = read_shape(write(tmp_path, model_type="qwen3")).total_parameters
    tied = read_shape(write(tmp_path, tie_word_embeddings=True)).total_parameters
    assert (biased - plain, normed - plain, plain - tied) == (2 * 16, 2 * 8, 256)


def test_experts_replace_the_mlp_and_only_the_chosen_ones_are_active(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    shape = read_shape(write(tmp_path, **experts))
    assert shape.expert_parameters == 2 * 4 * 3 * 8 * 6
    assert shape.total_parameters == 1152 + 2 * (208 + 8 * 4) + 8 + 512
    assert shape.total_parameters - shape.active_parameters == 1152 // 2
    mixed = read_shape(write(tmp_path, **experts, mlp_only_layers=[0]))
    assert mixed.expert_layers == 1
    assert mixed.total_parameters == 576 + 2 * 208 + 384 + 32 + 8 + 512


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe_text"])
def test_adapters_of_experts_count_where_experts_take_any(tmp_path: Path, kind: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    shape = read_shape(write(tmp_path, model_type=kind, **experts))
    as_wide = read_shape(write(tmp_path, intermediate_size=4 * (8 + 6) - 8))
    assert shape.adapter_parameters(2, experts=True) == as_wide.adapter_parameters(2, experts=True)
    without = shape.adapter_parameters(2, experts=False)
    other = read_shape(write(tmp_path, model_type="mixtral", **experts))
    assert without == other.adapter_parameters(2, experts=True)
    assert without == shape.adapter_parameters(2, experts=True) - 2 * 2 * 4 * 3 * (8 + 6)


def test_the_language_model_of_a_vision_model_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "x_vl", "text_config": TINY}))
    assert read_shape(file) == read_shape(write(tmp_path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "left out"}, "hidden_size = None: expected a whole number"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers = 'two'"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_a_config_that_gives_no_shape_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=named) as raised:
        read_shape(file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="give a config"):
        read_shape(file)


def test_a_shape_is_found_in_the_models_folder(tmp_path: Path) -> None:
    write(tmp_path)
    shape = find_shape(str(tmp_path))
    assert shape is not None
    assert shape.layers == 2
    assert find_shape("Qwen3-8B") is None
    assert find_shape("") is None
