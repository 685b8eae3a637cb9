"""The trainer's own decoder layers compute what those of transformers do."""

from __future__ import annotations

import copy
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from services.trainer.learner.model import forward, loading
from services.trainer.learner.model.attention import PACKED_ATTENTION
from services.trainer.learner.model.decoder import DecoderLayer, use_native_layers
from services.trainer.learner.model.forward import TokenPass, response_values, token_outputs
from services.trainer.learner.model.loading import load_critic, load_policy
from sluice.algorithm import token_statistics as head_statistics
from sluice.config.schema.actor import FsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from tests.support.layer_parity import (
    MAX_ERROR,
    TEMPERATURE,
    gradients,
    pack,
    parity_rows,
    plain,
    weighed,
    worst_error,
)
from tests.support.tiny_policy import make_model, save_model
from tests.unit.trainer.test_packed_parity import use_ragged_kernel

FLOAT32 = FsdpConfig(dtype="float32")
_ORIGINAL = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama 3": ("llama", {"rope_parameters": _ORIGINAL | _LLAMA3 | {"factor": 4.0}}),
    "Llama, linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "Qwen2.5": ("qwen2", {}),
    "Qwen2.5, yarn": (
        "qwen2",
        {"rope_parameters": _ORIGINAL | {"rope_type": "yarn", "factor": 4.0}},
    ),
    "Qwen3": ("qwen3", {}),
    "Qwen3, yarn": (
        "qwen3",
        {"rope_parameters": _ORIGINAL | {"rope_type": "yarn", "factor": 4.0}},
    ),
    "Qwen3, untied": ("qwen3", {"tie_word_embeddings": False}),
    "Qwen3-MoE": ("qwen3_moe", {}),
}


def native_layers(model: nn.Module) -> list[DecoderLayer]:
    return [one for one in model.modules() if isinstance(one, DecoderLayer)]


def random_norms(model: nn.Module) -> None:
    """Norms and biases begin as 1 and 0, which would hide what is left out."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_gradients_are_those_of_transformers_layers(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = make_model(family, **changes)
    random_norms(model)
    model.save_pretrained(tmp_path)
    expected, of_plain = plain(model)
    micro_batch = pack(parity_rows())
    for recomputes in (False, True):
        settings = ModelConfig(path=str(tmp_path), enable_gradient_checkpointing=recomputes)
        own = load_policy(settings, FLOAT32, max_tokens=28).model
        assert len(native_layers(own)) == model.config.num_hidden_layers
        logprobs = token_outputs(own, TokenPass(micro_batch, TEMPERATURE)).logprobs
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
        assert worst_error(gradients(own, weighed(logprobs, micro_batch)), of_plain) <= MAX_ERROR


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name][0] != "qwen3_moe"])
def test_in_bfloat16_logprobs_are_those_of_transformers_layers_to_the_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM rounds in transformers' order too: what differs here differs from the engine.
    family, changes = MODELS[name]
    model = make_model(family, **changes)
    random_norms(model)
    model.save_pretrained(tmp_path)
    settings, precision = ModelConfig(path=str(tmp_path)), FsdpConfig(model_dtype="bfloat16")
    found = [load_policy(settings, precision, max_tokens=28).model]
    monkeypatch.setattr(loading, "use_native_layers", lambda *_, **__: None)
    found.append(load_policy(settings, precision, max_tokens=28).model)
    assert [bool(native_layers(one)) for one in found] == [True, False]
    own, theirs = (token_outputs(one, TokenPass(pack(parity_rows()))) for one in found)
    assert torch.equal(own.logprobs, theirs.logprobs)


@pytest.mark.parametrize("attention", ["blocks", "end to end"])
def test_padding_changes_nothing(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention == "end to end":
        use_ragged_kernel(monkeypatch)
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    own = load_policy(ModelConfig(path=str(tmp_path)), FLOAT32, max_tokens=28).model
    expected, of_plain = plain(model)
    micro_batch = pack(parity_rows(), pad_to=512)
    assert micro_batch.input_ids.shape == micro_batch.position_ids.shape == (1, 512)
    logprobs = token_outputs(own, TokenPass(micro_batch, TEMPERATURE)).logprobs
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert worst_error(gradients(own, weighed(logprobs, micro_batch)), of_plain) <= MAX_ERROR


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at inputs
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_compiled_layers_compute_the_same_and_share_their_code(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is captured and differentiated is the rule here, and kernels take minutes to build.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(head_statistics, "_COMPILED", {})
    torch._dynamo.reset()
    clear_compilation_metrics()
    model = make_model(family)
    model.save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), enable_gradient_checkpointing=True)
    own = load_policy(settings, FsdpConfig(dtype="float32", use_torch_compile=True), 28).model
    expected, of_plain = plain(model)
    micro_batch = pack(parity_rows())
    logprobs = token_outputs(own, TokenPass(micro_batch, TEMPERATURE)).logprobs
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert worst_error(gradients(own, weighed(logprobs, micro_batch)), of_plain) <= MAX_ERROR
    compiled = [one.co_name for one in get_compilation_metrics() if one.co_name]
    assert "_heads" in compiled
    assert len(set(compiled)) == len(compiled)  # once, for both layers
    torch._dynamo.reset()


def test_a_critic_has_the_values_of_transformers_layers(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    torch.manual_seed(0)
    own = load_critic(ModelConfig(path=str(folder)), FLOAT32, max_tokens=28).model
    assert native_layers(own)
    micro_batch = pack(parity_rows())
    values = response_values(own, micro_batch)
    plain_critic = type(own).from_pretrained(folder, num_labels=1, attn_implementation="eager")
    plain_critic.load_state_dict(own.state_dict())
    plain_critic.eval()
    row = parity_rows()[2]
    tokens = torch.tensor([[*row.prompt_token_ids.tolist(), *row.token_ids.tolist()]])
    expected = plain_critic(input_ids=tokens, use_cache=False).logits[0, :, 0]
    found = values[micro_batch.rows == 2]
    torch.testing.assert_close(found, expected[row.prompt_token_ids.size - 1 : -1])


def test_names_and_saved_files_are_those_of_transformers(tmp_path: Path) -> None:
    for family in ("qwen3", "qwen3_moe"):
        folder = save_model(tmp_path / family, family)
        own = load_policy(ModelConfig(path=str(folder)), FLOAT32, max_tokens=28).model
        plain_names = {n for n, _ in make_model(family).named_parameters()}
        assert {n for n, _ in own.named_parameters()} == plain_names
        own.save_pretrained(tmp_path / "again")
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes(), file


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mistral", "MistralForCausalLM .* the family has no own ones"), ("qwen3", "their gate is n")],
)
def test_what_the_native_layers_do_not_compute_trains_with_transformers_layers(
    family: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(family)
    if family == "qwen3":  # as a later release may add
        model.base_model.layers[1].self_attn.gate = nn.Linear(32, 4)
    before = list(model.modules())
    with caplog.at_level(logging.INFO):
        use_native_layers(model)
    assert list(model.modules()) == before
    (record,) = caplog.records
    assert re.search(reason, record.getMessage())


def test_in_bfloat16_they_are_as_close_to_float32_as_transformers_layers() -> None:
    exact = make_model("qwen3")
    random_norms(exact)
    exact.set_attn_implementation(PACKED_ATTENTION)
    theirs = copy.deepcopy(exact).bfloat16()
    own = copy.deepcopy(theirs)
    use_native_layers(own)
    micro_batch = pack(parity_rows())
    with torch.no_grad():
        expected, *found = (
            token_outputs(one, TokenPass(micro_batch, TEMPERATURE)).logprobs
            for one in (exact, own, theirs)
        )
    of_own, of_theirs = ((one - expected).square().mean().sqrt() for one in found)
    assert of_own <= 1.1 * of_theirs


def test_a_float32_head_computes_logprobs_and_gradients_from_float32_logits(tmp_path: Path) -> None:
    save_model(tmp_path)
    settings = ModelConfig(path=str(tmp_path), float32_head=True)
    model = load_policy(settings, FsdpConfig(model_dtype="bfloat16"), max_tokens=28).model
    micro_batch = pack(parity_rows())
    found = token_outputs(model, TokenPass(micro_batch)).logprobs
    of_weight = gradients(model, weighed(found, micro_batch))
    hidden = model.base_model(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        packed_layout=micro_batch.layout.for_one_pass(),
    ).last_hidden_state[0, micro_batch.predecessors]
    logits = hidden.float() @ model.lm_head.weight.float().t()
    expected = logits.log_softmax(-1).gather(-1, micro_batch.labels[:, None])[:, 0]
    torch.testing.assert_close(found, expected)
    assert worst_error(gradients(model, weighed(expected, micro_batch)), of_weight) < 0.02


def test_a_float32_head_is_copied_only_where_the_device_does_not_multiply_into_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path)
    settings = ModelConfig(path=str(tmp_path), float32_head=True)
    model = load_policy(settings, FsdpConfig(model_dtype="bfloat16"), max_tokens=28).model
    copied = forward._head(model)
    assert (copied.weight.dtype, copied.is_wide) == (torch.float32, False)
    monkeypatch.setattr(head_statistics, "widens", head_statistics.is_half)
    kept = forward._head(model)
    assert kept.is_wide
    assert kept.weight is model.lm_head.weight
