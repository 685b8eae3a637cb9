"""A rank reads the rows of its shards from a model's files, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from services.trainer.learner.model import export, weight_files
from services.trainer.learner.model.loading import load_critic, load_policy
from services.trainer.learner.model.sharding import fill_shards
from services.trainer.learner.model.weight_files import WeightFiles
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.tensor_layouts import exchange_layouts
from sluice.concurrency.waits import units_done
from sluice.config.schema.actor import FsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.errors import ConfigError
from tests.support.tiny_policy import COMMON, make_model, save_model
from tests.support.tiny_vision import save_model as save_vision_model

PRECISION = FsdpConfig(dtype="float32")


@pytest.mark.parametrize("family", ["qwen3", "llama", "granite", "qwen3_moe"])
def test_parts_are_those_of_the_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 300)  # so that a tensor takes several parts
    files = WeightFiles(save_model(tmp_path, family))
    parameters = dict(make_model(family).named_parameters())
    assert files.match(parameters)
    for name, whole in parameters.items():
        columns = whole.shape[1] // 2 if whole.ndim > 1 else 0
        for start, stop in ((0, whole.shape[0]), (whole.shape[0] // 2, whole.shape[0]), (1, 1)):
            for column in {0, columns}:
                expected = whole[start:stop, column:] if whole.ndim > 1 else whole[start:stop]
                target = torch.full_like(expected, torch.nan)
                files.fill(target, name, (start, column, 0)[: whole.ndim])
                assert torch.equal(target, expected), name


def test_several_files_with_an_index_are_one_model(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert WeightFiles(tmp_path).match(dict(model.named_parameters()))


def test_another_shape_or_name_is_not_the_models(tmp_path: Path) -> None:
    files = WeightFiles(save_model(tmp_path, "qwen3_moe"))
    parameters = dict(make_model("qwen3_moe").named_parameters())
    assert not files.match(dict(make_model("qwen3_moe", num_experts=4).named_parameters()))
    assert not files.match({**parameters, "model.other.weight": torch.ones(1)})


def test_weights_are_not_read_before_the_model_is_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(path=str(save_model(tmp_path, "qwen3")))
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    initialized = mock.Mock()
    monkeypatch.setattr(PreTrainedModel, "_init_weights", initialized)
    loaded = load_policy(model, PRECISION, 28, is_sharded=True)
    assert loaded.files is not None
    assert not initialized.called
    assert loaded.model.generation_config.eos_token_id == [5, 6]
    rotations = [b for name, b in loaded.model.named_buffers() if name.endswith("inv_freq")]
    expected = [b for name, b in make_model("qwen3").named_buffers() if name.endswith("inv_freq")]
    assert all(map(torch.equal, rotations, expected))
    assert load_policy(model, PRECISION, 28).files is None


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_vision_model_is_read_by_its_shards_as_transformers_reads_it(
    family: str, tmp_path: Path
) -> None:
    save_vision_model(family, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [one for one in tensors if one.endswith("gate_up_proj")]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()  # as it was published
    save_file(tensors, file, metadata={"format": "pt"})
    model = ModelConfig(path=str(tmp_path))
    loaded, whole = (load_policy(model, PRECISION, 28, is_sharded=one) for one in (True, False))
    assert loaded.files is not None
    found, expected = dict(loaded.model.named_parameters()), dict(whole.model.named_parameters())
    fill_shards(found, loaded.files)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one), name
        part = torch.empty_like(one[:, 1:]) if one.ndim > 1 else torch.empty_like(one)
        loaded.files.fill(part, name, (0, 1, *[0] * one.ndim)[: one.ndim])
        assert torch.equal(part, one[:, 1:] if one.ndim > 1 else one), name
    for ours, theirs in zip(loaded.model.buffers(), whole.model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_every_bucket_of_a_model_that_is_published_in_another_form_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "BUCKET_BYTES", 1 << 12)
    config = AutoConfig.for_model("mixtral", **COMMON, num_local_experts=4)
    model = AutoModelForCausalLM.from_config(config)
    parts = {name: one.detach() for name, one in model.named_parameters()}
    alone = ParallelContext()
    places = exchange_layouts(parts, alone)
    assert export.published_names(model, places) is None
    before = units_done()
    gathering = export.write_model(tmp_path, model, parts, places, alone)
    units = [units_done() for _, _ in zip(range(8), gathering, strict=False)]
    assert [unit - before for unit in units] == list(range(8))
    assert not [*tmp_path.glob("*.safetensors")]  # so far nothing is written
    assert [*gathering]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    for name, one in saved.named_parameters():
        assert torch.equal(one, parts[name]), name


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_model_with_saved_buffers_is_left_to_transformers(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        family,
        **{**COMMON, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1},
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert set(dict(model.named_buffers())) & set(model.state_dict())
    model.save_pretrained(tmp_path)
    assert WeightFiles(tmp_path)
    assert (
        load_policy(ModelConfig(path=str(tmp_path)), PRECISION, 28, is_sharded=True).files is None
    )


@pytest.mark.parametrize("change", ["quantised", "own head", "stale index"])
def test_files_that_transformers_would_read_otherwise_are_left_to_it(
    change: str, tmp_path: Path
) -> None:
    file = save_model(tmp_path, "qwen3") / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "quantised":
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    elif change == "own head":
        tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    files = WeightFiles(tmp_path)
    if change == "stale index":
        old = {"weight_map": dict.fromkeys(tensors, "old.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(old), encoding="utf-8")
        files = WeightFiles(tmp_path)  # of the one file
    assert files.match(dict(make_model("qwen3").named_parameters())) == (change == "stale index")


def test_files_with_other_names_are_left_to_transformers(tmp_path: Path) -> None:
    model = ModelConfig(path=str(save_model(tmp_path, "gpt_neox")))
    assert load_policy(model, PRECISION, 28, is_sharded=True).files is None


def test_a_model_that_lacks_weights_is_refused_with_the_first_one(tmp_path: Path) -> None:
    file = save_model(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing.*model\.norm\.weight"):
        load_policy(ModelConfig(path=str(tmp_path)), PRECISION, 28, is_sharded=True)


def test_ranks_with_other_files_are_distinguished(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3")
    before = WeightFiles(folder).probe()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.25
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert WeightFiles(folder).probe() == pytest.approx(before + 0.25)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_critic_is_read_by_its_shards_too_and_its_new_head_is_the_same(
    family: str, tmp_path: Path
) -> None:
    model = ModelConfig(path=str(save_model(tmp_path, family)))
    torch.manual_seed(3)
    whole = load_critic(model, PRECISION, 28)
    torch.manual_seed(3)
    parts = load_critic(model, PRECISION, 28, is_sharded=True)
    assert whole.files is None
    assert parts.files is not None
    fill_shards(dict(parts.model.named_parameters()), parts.files)
    expected, found = dict(whole.model.named_parameters()), dict(parts.model.named_parameters())
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    # One that was saved has its head in the files.
    whole.model.save_pretrained(tmp_path / "critic")
    saved = load_critic(ModelConfig(path=str(tmp_path / "critic")), PRECISION, 28, is_sharded=True)
    assert saved.files is not None
    assert "score.weight" in saved.files
