"""Own experts: those of transformers in other words, with choices that a pass keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.trainer.learner.learner import Learner
from services.trainer.learner.model import experts as experts_module
from services.trainer.learner.model.experts import (
    Routing,
    RoutingTape,
    balance_metrics,
    check_dividable,
    expert_blocks,
    routing_tape,
    use_native_experts,
)
from services.trainer.learner.ranks import ParallelContext
from sluice.errors import ConfigError
from tests.support import tiny_vision
from tests.support.host_reads import HostReads
from tests.support.tiny_policy import VOCABULARY, make_batch, make_config, make_model, save_model

IDS = torch.arange(40)[None] * 7 % VOCABULARY


def own_model(**changes: object) -> PreTrainedModel:
    model = make_model("qwen3_moe", **changes)
    use_native_experts(model)
    return model


def tape_of(model: PreTrainedModel) -> RoutingTape:
    tape = routing_tape(model)
    assert tape is not None
    return tape


def run(model: PreTrainedModel, routing: Routing | None = None) -> Tensor:
    tape_of(model).follow(routing)
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    logprobs = model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)
    (logprobs * torch.linspace(-1, 1, VOCABULARY)).sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("normalizes", [True, False])
def test_gradients_are_those_of_transformers(normalizes: bool) -> None:
    expected = gradients(make_model("qwen3_moe", norm_topk_prob=normalizes))
    found = gradients(own_model(norm_topk_prob=normalizes))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * gradient.abs().max(), name


def test_a_loop_replaces_grouped_products_where_torch_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = gradients(own_model())
    monkeypatch.setattr(experts_module, "_grouped_mm", None)
    for name, gradient in gradients(own_model()).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_experts_that_get_no_row_at_all_are_no_grouped_product_and_have_gradients_of_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts_module, "_grouped_mm", None)
    monkeypatch.setattr(torch.Tensor, "tensor_split", None)
    rows = torch.empty(0, 4, requires_grad=True)
    weights = torch.randn(3, 5, 4, requires_grad=True)
    found = experts_module._expert_products(rows, weights, torch.zeros(3, dtype=torch.int32))
    assert found.shape == (0, 5)
    found.sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    assert rows.grad.shape == (0, 4)
    assert not weights.grad.any()


def test_the_text_of_a_vision_language_model_gets_them_too(tmp_path: Path) -> None:
    model = tiny_vision.save_model("qwen3_vl_moe", tmp_path)
    names = model.state_dict().keys()
    expected = model(input_ids=IDS, use_cache=False).logits
    use_native_experts(model)
    assert model.state_dict().keys() == names
    assert len(list(expert_blocks(model))) == 2
    torch.testing.assert_close(run(model), expected)


def test_the_router_computes_in_float32_whatever_the_weights_dtype() -> None:
    model = own_model().bfloat16()
    tokens = torch.randn(30, 32).to(torch.bfloat16)
    for block in expert_blocks(model):
        exact = (tokens.double() @ block.gate.weight.double().t()).softmax(-1)
        found = block.gate(tokens)
        assert found.dtype == torch.float32
        assert (found - exact).abs().max() < 1e-6
        assert block(tokens).dtype == torch.bfloat16


@pytest.fixture
def alone() -> Iterator[ParallelContext]:
    """A group of one rank."""
    parallel = ParallelContext()
    yield parallel
    parallel.close()


def test_counts_are_exchanged_once_a_layer_and_not_again_where_it_is_recomputed(
    alone: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own_model()
    mesh = alone.shard_mesh(1)
    assert mesh is not None
    for block in expert_blocks(model):
        block.divide(mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    exchanges: list[int] = []
    exchanged = RoutingTape._exchange_counts

    def counted(tape: RoutingTape, counts: Tensor) -> object:
        exchanges.append(len(counts))
        return exchanged(tape, counts)

    monkeypatch.setattr(RoutingTape, "_exchange_counts", counted)
    routing = Routing()
    loss = run(model, routing).logsumexp(-1).sum()
    assert exchanges == [1, 1]
    loss.backward()
    assert exchanges == [1, 1]
    run(model, routing).sum().backward()
    assert exchanges == [1, 1, 2]  # all layers of a replayed pass at once


def test_a_block_reads_only_divided_counts_on_the_host_and_once(alone: ParallelContext) -> None:
    model = own_model()
    (block, *_) = expert_blocks(model)
    tokens = torch.randn(1, 30, 32, requires_grad=True)
    mesh = alone.shard_mesh(1)
    assert mesh is not None
    for divides in (False, True):
        if divides:
            block.divide(mesh)
        tape_of(model).begin()
        with HostReads() as found:
            found.is_watching = True
            checkpoint(block, tokens, use_reentrant=False).sum().backward()
        assert found.found == [str(Tensor.tolist)] * divides


def test_a_replayed_pass_takes_the_experts_of_the_first_whatever_the_router_has_become() -> None:
    model = own_model()
    routing = Routing()
    first = run(model, routing)
    chosen = {layer: one.clone() for layer, one in routing.experts.items()}
    torch.testing.assert_close(run(model, routing), first, rtol=0, atol=0)
    with torch.no_grad():
        for block in expert_blocks(model):
            block.gate.weight.neg_()
    replayed, free = run(model, routing), run(model)
    assert all(torch.equal(routing.experts[layer], one) for layer, one in chosen.items())
    assert not torch.equal(replayed, first)  # weights are the router's of today
    assert not torch.equal(replayed, free)


def test_with_r2_each_micro_batch_chooses_its_experts_once_a_train_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[int] = []
    note = RoutingTape.note

    def noted(tape: RoutingTape, layer: int, experts: Tensor) -> None:
        layers.append(layer)
        note(tape, layer, experts)

    folder, found = save_model(tmp_path, "qwen3_moe"), []
    for mode in ("disabled", "R2"):
        # Two mini-batches of two micro-batches each.
        config = make_config(folder, 4, router_replay={"mode": mode}, ppo_epochs=2)
        learner = Learner(config, ParallelContext(), total_steps=10)
        with monkeypatch.context() as patch:
            patch.setattr(RoutingTape, "note", noted)
            learner.train_step(make_batch(4), 1)
        found.append(len(layers) // 2)
        layers.clear()
    assert found == [2 + 2 * 4, 4]


def test_balance_is_the_load_over_the_mean_load_less_one() -> None:
    load = torch.tensor([[4, 4, 4, 4], [8, 4, 4, 0]])
    assert balance_metrics(load) == {
        "actor/moe/max_vio/avg": 0.5,
        "actor/moe/max_vio/max": 1.0,
        "actor/moe/avg_vio/avg": 0.25,
    }


def test_loads_count_what_layers_choose_and_not_what_they_repeat() -> None:
    model, routing = own_model(), Routing()
    run(model, routing)
    run(model, routing)
    load = tape_of(model).take_load(torch.device("cpu"))
    assert load.sum(1).tolist() == [80, 80]


def test_a_rank_without_rows_adds_zeros_to_the_ranks_sum_of_loads() -> None:
    load = tape_of(own_model()).take_load(torch.device("cpu"))
    assert load.tolist() == [[0] * 8, [0] * 8]


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("qwen3_moe", 3, r"expert_parallel_size=3 does not divide the 8 experts .* give 2 or 4"),
        ("qwen3", 2, r"expert_parallel_size=2: the trainer has own experts for qwen3_moe"),
        ("mixtral", 2, r"none for a mixtral model; set it to 1"),
    ],
)
def test_models_whose_experts_cannot_be_divided_are_refused(
    family: str, size: int, message: str
) -> None:
    if family == "mixtral":
        config = AutoConfig.for_model(family, num_hidden_layers=1)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    else:
        model = make_model(family)
    use_native_experts(model)
    check_dividable(model, 1)
    with pytest.raises(ConfigError, match=message):
        check_dividable(model, size)


def test_ranks_of_a_copy_must_divide_into_those_of_experts(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3_moe")
    sharding = {"dtype": "float32", "expert_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"expert_parallel_size=2 does not divide the 1 "):
        Learner(make_config(folder, fsdp_config=sharding), ParallelContext(), total_steps=1)


def test_routing_replay_needs_native_experts(tmp_path: Path) -> None:
    config = make_config(save_model(tmp_path), router_replay={"mode": "R2"})
    with pytest.raises(
        ConfigError, match=r"mode=R2: .* none for a qwen3 model; set it to disabled"
    ):
        Learner(config, ParallelContext(), total_steps=1)
