"""A run with adapters trains these and nothing else, by the formula, and its files are peft's."""

from __future__ import annotations

import json
import math
import resource
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from services.trainer.learner.learner import Learner
from services.trainer.learner.model.experts import ExpertAdapter, RoutingTape, use_native_experts
from services.trainer.learner.model.forward import TokenPass, token_outputs
from services.trainer.learner.model.lora import (
    adapted_layers,
    adapter_parameters,
    add_adapters,
    scaled_for_sending,
    without_adapters,
)
from services.trainer.learner.model.passes import idle_micro_batch
from services.trainer.learner.ranks import ParallelContext
from sluice.checkpoint.merge import MergeOptions, merge_checkpoint
from sluice.checkpoint.source import find_source
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.errors import CheckpointError, ConfigError
from sluice.weights.adapters import B_SUFFIX, adapted_part, merge_adapters
from tests.support import tiny_vision
from tests.support.layer_parity import random_adapter
from tests.support.saved_adapter import write_adapter
from tests.support.streamed_weights import streamed
from tests.support.tiny_policy import adapting, make_batch, make_config, make_model, save_model

CPU = torch.device("cpu")
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_learner(folder: Path, model: dict[str, Any] | None = None, **actor: Any) -> Learner:
    config = adapting(make_config(folder, **actor), **{"lora_rank": 4, **(model or {})})
    return Learner(config, ParallelContext(), total_steps=10)


def adapted_model(family: str = "qwen3", *, own_experts: bool = True, **keys: Any) -> Any:
    """A tiny model with adapters whose B is not 0."""
    model = make_model(family)
    if own_experts:
        use_native_experts(model)
    add_adapters(model, msgspec.convert({"lora_rank": 4, **keys}, ModelConfig), torch.float32)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_(std=0.2)
    return model


def copies(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.named_weights()}


def served(learner: Learner) -> dict[str, torch.Tensor]:
    """The weights that an engine computes with."""
    return dict(merge_adapters(streamed(learner)))


def test_products_for_the_wire_lie_in_memory_one_at_a_time() -> None:
    model = adapted_model("qwen3")
    wire = scaled_for_sending(model, adapter_parameters(model))
    products = [weakref.ref(wire[name]) for name in wire if name.endswith(B_SUFFIX)]
    assert products
    assert not any(one() is not None for one in products)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_neox", "qwen3_moe"])
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(family: str) -> None:
    model = adapted_model(family, lora_alpha=12.0)
    ids = torch.arange(3, 20)[None]
    model(input_ids=ids).logits.log_softmax(-1)[..., 7].sum().backward()
    plain = make_model(family)
    with torch.no_grad():
        weights = merge_adapters(scaled_for_sending(model, dict(model.named_parameters())))
    plain.load_state_dict(weights, strict=False)
    plain(input_ids=ids).logits.log_softmax(-1)[..., 7].sum().backward()
    layers = adapted_layers(model)
    assert layers
    for name, layer in layers.items():
        # W' = W + s B A, so dA = s B^T dW' and dB = s dW' A^T, of each expert.
        part = adapted_part(name)
        of_weight = plain.get_parameter(part.weight).grad
        assert of_weight is not None
        change = part.view(of_weight)
        scale, a, b = 12.0 / 4, layer.lora_A.weight, layer.lora_B.weight
        for found, expected in (
            (a.grad, scale * b.mT @ change),
            (b.grad, scale * change @ a.mT),
        ):
            assert found is not None
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert not model.get_parameter(part.weight).requires_grad


@pytest.mark.parametrize(("dtype", "rank"), [(torch.bfloat16, 3), (torch.float32, 5)])
def test_any_rank_is_computed_for_experts_in_any_dtype(dtype: torch.dtype, rank: int) -> None:
    """Grouped products take only some."""
    torch.manual_seed(0)
    adapter = ExpertAdapter((4, 24, 16), rank, 0.5, dtype, CPU)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter)
    a, b = (half.weight.double() for half in (adapter.lora_A, adapter.lora_B))
    rows, counts = torch.randn(9, 16, dtype=dtype), torch.tensor([2, 0, 4, 3])
    found = adapter(rows, counts.cumsum(0).int())
    experts = torch.arange(4).repeat_interleave(counts)
    exact = 0.5 * (b[experts] @ a[experts] @ rows.double()[:, :, None])[:, :, 0]
    torch.testing.assert_close(found.double(), exact, atol=0.2, rtol=torch.finfo(dtype).eps * 4)


def test_adapters_of_experts_off_leave_the_model(tmp_path: Path) -> None:
    learner = make_learner(save_model(tmp_path, "qwen3_moe"))
    learner.train_step(make_batch(), 1)
    model, tokens = learner._model, idle_micro_batch(CPU, ParallelContext())
    plain = make_learner(tmp_path, {"exclude_modules": r".*\.experts\..*"})._model
    with torch.no_grad():
        trained = token_outputs(model, TokenPass(tokens)).logprobs
        with without_adapters(model), without_adapters(plain):
            found, expected = (
                token_outputs(one, TokenPass(tokens)).logprobs for one in (model, plain)
            )
    assert torch.equal(found, expected)
    assert not torch.equal(found, trained)


def test_the_first_policy_is_the_model_and_only_adapters_change(folder: Path) -> None:
    learner = make_learner(folder)
    before, base = copies(learner), dict(make_model().named_parameters())
    assert all(torch.equal(one, base[name].bfloat16()) for name, one in served(learner).items())
    learner.train_step(make_batch(), 1)
    changed = {n for n, one in learner.named_weights() if not torch.equal(one, before[n])}
    assert changed == {name for name in before if ".lora_" in name}
    moments = {n.rpartition(".")[0] for n in learner._optimizer.state_tensors()}
    assert moments == changed


def test_the_reference_is_the_model_without_adapters(folder: Path) -> None:
    learner = make_learner(folder, use_kl_loss=True, kl_loss_coef=0.1)
    first = learner.train_step(make_batch(), 1)
    second = learner.train_step(make_batch(seed=2), 2)
    assert first["actor/kl_loss"] < second["actor/kl_loss"]
    whole = make_learner(folder, use_kl_loss=True, kl_loss_coef=0.1)
    whole.train_step(make_batch(), 1)
    model, tokens = whole._model, idle_micro_batch(CPU, ParallelContext())
    with torch.no_grad(), without_adapters(model):
        found = token_outputs(model, TokenPass(tokens)).logprobs
    assert torch.equal(
        found, token_outputs(make_learner(folder)._model, TokenPass(tokens)).logprobs
    )


def test_the_balance_of_experts_is_that_of_the_policys_passes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loads, take_load = save_model(tmp_path, "qwen3_moe"), [], RoutingTape.take_load

    def taken(tape: RoutingTape, device: torch.device) -> torch.Tensor:
        loads.append(take_load(tape, device))
        return loads[-1]

    monkeypatch.setattr(RoutingTape, "take_load", taken)
    for measures_divergence in (False, True):
        learner = make_learner(folder, use_kl_loss=measures_divergence, kl_loss_coef=0.0)
        learner._update._expert_balance()
        assert not loads.pop().any()  # the trial of packed tokens is no pass of the run
        learner.train_step(make_batch(), 1)
    without, beside_a_reference = loads
    assert torch.equal(without, beside_a_reference)
    assert without.any()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_frozen_weights_have_the_dtype_of_the_passes_and_adapters_that_of_masters(
    family: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, family)
    learner = make_learner(folder, fsdp_config={"dtype": "bfloat16", "model_dtype": "float32"})
    learner.train_step(make_batch(), 1)
    dtypes = {name: one.dtype for name, one in learner.named_weights()}
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, PROJECTIONS),
        ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj", "v_proj"}),
        ({"target_modules": r".*\.(up|down)_proj"}, {"up_proj", "down_proj"}),
        ({"exclude_modules": ["q_proj", "mlp.up_proj"]}, PROJECTIONS - {"q_proj", "up_proj"}),
        ({"exclude_modules": r".*self_attn.*"}, {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_layers_are_chosen_as_peft_does(keys: dict[str, Any], expected: set[str]) -> None:
    names = adapted_layers(adapted_model(**keys))
    assert {name.rpartition(".")[2] for name in names} == expected
    assert len(names) == 2 * len(expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"gate_proj", "up_proj", "down_proj"}),
        ({"target_modules": ["up_proj", "q_proj"]}, {"up_proj"}),
        ({"target_modules": r".*\.experts\.\d+\.(gate|up)_proj"}, {"gate_proj", "up_proj"}),
        ({"exclude_modules": r".*\.experts\..*"}, set()),
        ({"exclude_modules": ["down_proj"]}, {"gate_proj", "up_proj"}),
    ],
)
def test_experts_are_chosen_by_the_names_that_each_has_in_files(
    keys: dict[str, Any], expected: set[str]
) -> None:
    names = [n for n in adapted_layers(adapted_model("qwen3_moe", **keys)) if ".experts." in n]
    assert {name.rpartition(".")[2] for name in names} == expected
    assert len(names) == 2 * len(expected)


def test_some_experts_of_a_layer_alone_get_no_adapter() -> None:
    message = r"names model\.layers\.0\.mlp\.experts\.3\.up_proj and not .*\.0\.up_proj; experts of"
    one = ["experts.3.up_proj"]
    with pytest.raises(ConfigError, match=message):
        adapted_model("qwen3_moe", target_modules=one)
    with pytest.raises(ConfigError, match=message):
        adapted_model("qwen3_moe", exclude_modules=one)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        (
            "qwen3",
            {"target_modules": ["qproj"]},
            r"'qproj' names none of the linear layers .*q_proj",
        ),
        ("qwen3", {"target_modules": "q_proj"}, r"'q_proj' names none of the linear"),
        ("llama", {"target_modules": ["lm_head"]}, r"'lm_head' names none of the linear"),
        ("qwen3", {"target_modules": ["embed_tokens"]}, r"'embed_tokens' names none of the"),
        ("qwen3_moe", {"target_modules": ["up_proj"]}, r"'up_proj' names none of the linear"),
        ("qwen3", {"exclude_modules": ".*"}, r"exclude_modules='\.\*' leaves no layer"),
        ("qwen3", {"target_modules": "(q"}, r"target_modules='\(q' is no regular expression"),
    ],
)
def test_names_that_fit_no_layer_are_refused_with_those_that_do(
    family: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted_model(family, own_experts=False, **keys)


def test_resuming_continues_bit_for_bit_from_files_without_the_model(
    folder: Path, tmp_path: Path
) -> None:
    straight = make_learner(folder, use_kl_loss=True)
    straight.train_step(make_batch(), 1)
    straight.save(tmp_path / "actor")
    weight_files = {f.relative_to(tmp_path).as_posix() for f in tmp_path.rglob("*.safetensors")}
    adapter = "actor/lora_adapter/adapter_model.safetensors"
    assert weight_files == {adapter, "actor/optimizer.safetensors"}
    resumed = make_learner(folder, use_kl_loss=True)
    resumed.load(tmp_path / "actor")
    for step in (2, 3):
        expected = straight.train_step(make_batch(seed=step), step)
        found = resumed.train_step(make_batch(seed=step), step)
        assert found["actor/grad_norm"] == expected["actor/grad_norm"]
    after = copies(resumed)
    assert all(torch.equal(one, after[name]) for name, one in copies(straight).items())


def test_a_checkpoint_of_another_kind_of_run_is_refused(folder: Path, tmp_path: Path) -> None:
    make_learner(folder).save(tmp_path / "adapters" / "actor")
    whole = Learner(make_config(folder), ParallelContext(), total_steps=10)
    whole.save(tmp_path / "whole" / "actor")
    with pytest.raises(CheckpointError, match=r"holds adapters and the run trains all weights"):
        whole.load(tmp_path / "adapters" / "actor")
    with pytest.raises(CheckpointError, match=r"holds all weights and the run trains adapters"):
        make_learner(folder).load(tmp_path / "whole" / "actor")
    for keys in ({"lora_rank": 8}, {"lora_alpha": 4.0}, {"target_modules": ["q_proj"]}):
        with pytest.raises(CheckpointError, match=r"does not fit the run.*resume with the same"):
            make_learner(folder, keys).load(tmp_path / "adapters" / "actor")


def test_a_saved_adapter_is_where_another_run_starts(folder: Path, tmp_path: Path) -> None:
    first = make_learner(folder, {"lora_alpha": 12.0})
    first.train_step(make_batch(), 1)
    first.save(tmp_path / "actor")
    path = tmp_path / "actor" / "lora_adapter"
    second = make_learner(folder, {"lora_rank": 0, "lora_adapter_path": str(path)})
    found, expected = served(second), served(first)
    assert all(torch.equal(one, found[name]) for name, one in expected.items())
    with pytest.raises(ConfigError, match=r"lora_rank=8: the adapter .* has rank 4; leave"):
        make_learner(folder, {"lora_rank": 8, "lora_adapter_path": str(path)})
    other = save_model(tmp_path / "other", hidden_size=64)
    with pytest.raises(ConfigError, match=r"is the adapter of another model than .*has shape"):
        make_learner(other, {"lora_rank": 0, "lora_adapter_path": str(path)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"r": 8}, r"has shape .* but adapter_config\.json says r=8"),
        ({"lora_alpha": "much"}, r"holds no adapter that can be read"),
        ({"lora_alpha": math.nan}, r"lora_alpha=nan make no adapter"),
        ({"lora_alpha": 0}, r"lora_alpha=0.0 make no adapter; write the run's"),
        ({"r": 0}, r"r=0 and .* make no adapter"),
    ],
)
def test_an_adapter_that_is_more_or_less_than_a_and_b_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_learner(folder).save(tmp_path / "actor")
    path = tmp_path / "actor" / "lora_adapter"
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(ConfigError, match=message):
        make_learner(folder, {"lora_rank": 0, "lora_adapter_path": str(path)})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_merged_folder_loads_with_the_weights_that_engines_had(
    family: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family)
    learner = make_learner(folder)
    learner.train_step(make_batch(), 1)
    learner.save(tmp_path / "actor")
    wanted = scaled_for_sending(learner._model, dict(learner.named_weights()))
    options = MergeOptions(dtype="float32")
    merge_checkpoint(find_source(tmp_path), tmp_path / "out", options, lambda *_: None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    found, expected = dict(loaded.named_parameters()), merge_adapters(wanted)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].detach(), weight, atol=1e-6, rtol=1e-6)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    named = json.loads((tmp_path / "actor/lora_adapter/adapter_config.json").read_text("utf-8"))
    assert named["base_model_name_or_path"] == str(folder)
    names = load_file(tmp_path / "actor/lora_adapter/adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    expert = "base_model.model.model.layers.0.mlp.experts.7.up_proj.lora_A.weight"
    assert (expert in names) == (family == "qwen3_moe")


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_lie_in_one_tensor_of_a_file_are_merged_as_published_or_transposed(
    tmp_path: Path, *, transposed: bool
) -> None:
    model = tiny_vision.save_model("qwen3_vl_moe", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    if transposed:
        tensors |= {n: one.mT.contiguous() for n, one in tensors.items() if "gate_up_proj" in n}
    save_file(tensors, file, metadata={"format": "pt"})
    adapter = random_adapter(model)
    write_adapter(tmp_path / "lora_adapter", replace(adapter, base=str(tmp_path / "model")))
    options = MergeOptions(dtype="float32")
    merge_checkpoint(find_source(tmp_path), tmp_path / "out", options, lambda *_: None)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", local_files_only=True)
    names = {name.partition(".experts.")[0] for name in adapter.layers if ".experts." in name}
    assert len(names) == 2
    for name in names:
        for weight in ("gate_up_proj", "down_proj"):
            of_all = f"{name}.experts.{weight}"
            expected = model.get_parameter(of_all).clone()
            for expert, projection in product(range(8), ("gate_proj", "up_proj", "down_proj")):
                part = adapted_part(f"{name}.experts.each.{projection}")
                a, b = (
                    adapter.tensors[f"{name}.experts.{expert}.{projection}.{half}.weight"]
                    for half in ("lora_A", "lora_B")
                )
                if part.weight == of_all:
                    part.view(expected[expert]).add_(adapter.scale * b @ a)
            torch.testing.assert_close(loaded.get_parameter(of_all), expected)


def test_an_adapter_is_merged_with_files_that_have_the_names_of_older_transformers(
    tmp_path: Path,
) -> None:
    model = tiny_vision.save_model("qwen2_5_vl", tmp_path / "model")
    adapter = random_adapter(model)
    write_adapter(tmp_path / "lora_adapter", replace(adapter, base=str(tmp_path / "model")))
    options = MergeOptions(dtype="float32")
    merge_checkpoint(find_source(tmp_path), tmp_path / "out", options, lambda *_: None)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", local_files_only=True)
    for prefix in ("model.visual.", "model.language_model."):
        assert any(layer.startswith(prefix) for layer in adapter.layers)
    for layer in adapter.layers:
        a, b = (adapter.tensors[f"{layer}.{half}.weight"] for half in ("lora_A", "lora_B"))
        expected = model.get_parameter(f"{layer}.weight") + adapter.scale * b @ a
        torch.testing.assert_close(loaded.get_parameter(f"{layer}.weight"), expected)


def test_merging_without_the_adapted_model_says_where_its_folder_is_named(
    folder: Path, tmp_path: Path
) -> None:
    make_learner(folder).save(tmp_path / "actor")
    file = tmp_path / "actor" / "lora_adapter" / "adapter_config.json"
    moved = json.loads(file.read_text("utf-8")) | {"base_model_name_or_path": "gone"}
    file.write_text(json.dumps(moved), "utf-8")
    with pytest.raises(CheckpointError, match=r"model in 'gone'.*as base_model_name_or_path into"):
        merge_checkpoint(find_source(tmp_path), tmp_path / "out", MergeOptions(), lambda *_: None)
    assert not (tmp_path / "out").exists()


def test_adapters_on_a_full_disk_fail_with_the_error_that_ends_a_save(
    folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(folder, {"lora_rank": 64})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            learner.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
