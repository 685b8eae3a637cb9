"""Routing replay R3: the trainer's passes follow the experts that came with the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.trainer.learner.batch.micro_batch import MicroBatch, PackedRouting, build_micro_batch
from services.trainer.learner.batch.packed_rows import training_rows
from services.trainer.learner.batch.train_batch import (
    BatchCut,
    RoutingShape,
    check_routing,
    split_batch,
)
from services.trainer.learner.learner import Learner
from services.trainer.learner.model.attention import PACKED_ATTENTION
from services.trainer.learner.model.experts import Routing, RoutingTape, routing_tape
from services.trainer.learner.model.experts import use_native_experts as use_own
from services.trainer.learner.model.forward import TokenPass, token_outputs
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.packing import plan_micro_batches
from sluice.errors import PeerError
from sluice.types import Rollout, RoutedExperts, TrainGroup
from tests.support.taken_samples import taken
from tests.support.tiny_policy import (
    made_up_routing,
    make_batch,
    make_config,
    make_group,
    make_model,
    routed,
    save_model,
)

LAYERS, EXPERTS, CHOSEN = 2, 8, 2


def own_model(**changes: object) -> PreTrainedModel:
    own = make_model("qwen3_moe", **changes)
    own.set_attn_implementation(PACKED_ATTENTION)
    use_own(own)
    return own


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return own_model(norm_topk_prob=True)


def packed(*groups: TrainGroup) -> MicroBatch:
    numbers = [range(len(group.rollouts)) for group in groups]
    rows = training_rows(groups, numbers, slice(None))
    (plan,) = plan_micro_batches(
        [row.size for row in rows], range(len(rows)), rows_per_micro=len(rows)
    )
    found = build_micro_batch(rows, plan, torch.device("cpu"))
    assert found is not None
    return found


def logprobs(model: PreTrainedModel, micro_batch: MicroBatch, routing: Routing) -> list[Tensor]:
    """By row."""
    found = token_outputs(model, TokenPass(micro_batch, routing=routing)).logprobs
    return [found[micro_batch.rows == row] for row in range(micro_batch.num_rows)]


@contextmanager
def choosing(model: PreTrainedModel, routing: RoutedExperts) -> Iterator[None]:
    """Transformers' routers choose these, [tokens, layers, k]."""
    routers = [one for one in model.modules() if type(one).__name__ == "Qwen3MoeTopKRouter"]

    def hook(layer: int) -> Callable[..., tuple[Tensor, ...]]:
        def forced(_router: object, _inputs: object, output: tuple[Tensor, ...]) -> Any:
            experts = torch.from_numpy(routing[:, layer].astype(np.int64))
            weights = output[0].softmax(-1).gather(1, experts)
            return output[0], weights / weights.sum(-1, keepdim=True), experts

        return forced

    handles = [one.register_forward_hook(hook(n)) for n, one in enumerate(routers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def of_transformers(group: TrainGroup, rollout: Rollout, routing: RoutedExperts) -> Tensor:
    model = make_model("qwen3_moe", norm_topk_prob=True)
    ids = torch.tensor([[*group.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]])
    with choosing(model, routing), torch.no_grad():
        found = model(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    start = group.prompt_token_ids.size
    return found[start - 1 :].gather(1, ids[0, start:, None])[:, 0]


def of_first(group: TrainGroup, rollout: Rollout) -> RoutedExperts:
    """A sample's experts, with those of the group's first sample for the prompt."""
    first, own = group.rollouts[0].routing, rollout.routing
    assert first is not None
    assert own is not None
    prompt = group.prompt_token_ids.size
    return np.concatenate((first[:prompt], own[prompt:]))


def test_logprobs_are_those_of_the_engines_experts_whatever_the_router_would_choose(
    model: PreTrainedModel,
) -> None:
    groups = [made_up_routing(make_group(seed, (5, 1, 7)), EXPERTS) for seed in (1, 2)]
    micro_batch = packed(*groups)
    found = logprobs(model, micro_batch, Routing(engine_experts=micro_batch.routing))
    free = logprobs(model, micro_batch, Routing())
    rows = [(group, one) for group in groups for one in group.rollouts]
    for row, (group, rollout) in enumerate(rows):
        expected = of_transformers(group, rollout, of_first(group, rollout))
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(free[row], expected, atol=1e-2)


def test_later_passes_and_the_backward_pass_take_the_engines_experts_too(
    model: PreTrainedModel,
) -> None:
    micro_batch = packed(made_up_routing(make_group(1), EXPERTS))
    routing = Routing(engine_experts=micro_batch.routing)
    first = torch.cat(logprobs(model, micro_batch, routing))
    assert micro_batch.routing is not None
    for layer, experts in routing.experts.items():
        assert torch.equal(experts, micro_batch.routing.experts[layer])
    again = torch.cat(logprobs(model, micro_batch, routing))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    again.sum().backward()
    for name, weight in model.named_parameters():
        if name.endswith("down_proj"):
            assert weight.grad is not None
            used = {int(e) for e in routing.experts[int(name.split(".")[2])].unique()}
            touched = weight.grad.flatten(1).abs().sum(1).nonzero().flatten().tolist()
            assert set(touched) <= used
    model.zero_grad()


def test_a_sample_without_experts_gets_those_of_the_trainers_router(
    model: PreTrainedModel,
) -> None:
    group = made_up_routing(make_group(3, (5, 6, 7)), EXPERTS)
    last = group.rollouts[2].with_routing(None)
    group = replace(group, rollouts=(*group.rollouts[:2], last))
    micro_batch = packed(group)
    routing = Routing(engine_experts=micro_batch.routing)
    found = logprobs(model, micro_batch, routing)
    own = routing.experts[0][-6:]  # the last row's tokens
    assert micro_batch.routing is not None
    assert not micro_batch.routing.known[-6:].any()
    assert own.unique().numel() > 1, "not the table's zeros"
    expected = of_transformers(group, group.rollouts[1], of_first(group, group.rollouts[1]))
    torch.testing.assert_close(found[1], expected, atol=1e-5, rtol=1e-5)


def test_more_experts_than_a_byte_holds_are_followed_too() -> None:
    model = own_model(num_experts=300)
    micro_batch = packed(made_up_routing(make_group(1), 300))
    routing = Routing(engine_experts=micro_batch.routing)
    logprobs(model, micro_batch, routing)
    assert micro_batch.routing is not None
    assert int(micro_batch.routing.experts.max()) > 255
    assert all(
        torch.equal(experts, micro_batch.routing.experts[layer])
        for layer, experts in routing.experts.items()
    )


def test_the_agreement_is_the_share_of_the_engines_experts_that_routers_choose_too(
    model: PreTrainedModel,
) -> None:
    tape = routing_tape(model)
    assert tape is not None
    tape.take_agreement(torch.device("cpu"))
    micro_batch, free = packed(make_group(1)), Routing()
    logprobs(model, micro_batch, free)
    own = torch.stack([free.experts[layer] for layer in range(LAYERS)])
    assert tape.take_agreement(torch.device("cpu")).tolist() == [0, 0]
    routed = packed(made_up_routing(make_group(1), EXPERTS))
    assert routed.routing is not None
    # The router's own in the other order, and in the last layer one that it has not chosen.
    theirs = own.flip(-1).clone()
    theirs[1, 0, 0] = next(e for e in range(EXPERTS) if e not in own[1, 0])
    given = replace(routed.routing, experts=theirs)
    logprobs(model, routed, Routing(engine_experts=given))
    agreed, num = tape.take_agreement(torch.device("cpu")).tolist()
    assert num == own.numel()
    # A token's layer above may choose others once one expert below has changed; here none is below.
    assert agreed == num - 1


def test_a_learner_replays_and_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[int] = []
    note = RoutingTape.note

    def noted(tape: RoutingTape, layer: int, experts: Tensor) -> None:
        layers.append(layer)
        note(tape, layer, experts)

    folder = save_model(tmp_path, "qwen3_moe")
    config = make_config(folder, 4, router_replay={"mode": "R3"}, ppo_epochs=2)
    learner = Learner(config, ParallelContext(), total_steps=10)
    batch = routed(make_batch(4), EXPERTS)
    first = batch.groups[0]
    bare = replace(first, rollouts=tuple(one.with_routing(None) for one in first.rollouts))
    batch = replace(batch, groups=(bare, *batch.groups[1:]))
    with monkeypatch.context() as patch:
        patch.setattr(RoutingTape, "note", noted)
        metrics = learner.train_step(batch, 1)
    assert len(layers) == LAYERS * 4, "each micro-batch once"
    assert metrics["actor/moe/engine_samples"] == 0.75
    assert 0.1 < metrics["actor/moe/engine_agreement"] < 0.5  # 2 of 8 at random


SHAPE = RoutingShape(LAYERS, EXPERTS, CHOSEN)


@pytest.mark.parametrize(
    ("change", "shape", "message"),
    [
        (lambda one: one[:-1], SHAPE, r"experts \(.*instead of \[tokens, layers"),
        (lambda one: one[:, :1], SHAPE, r"instead of \[tokens, layers, experts per token\]"),
        (lambda one: one[..., :1], SHAPE, r"instead of \[tokens, layers, experts per token\]"),
        (lambda one: one.astype(np.uint16), SHAPE, "experts in uint16 for 8 experts in a layer"),
        (lambda one: one * 0 + 8, SHAPE, "expert 8 of 8"),
        (lambda one: one * 0, SHAPE, "a token has an expert twice in a layer"),
        (lambda one: one, None, "experts for a model without any"),
    ],
)
def test_experts_that_are_not_the_models_are_refused_by_sample(
    change: Callable[[Any], Any], shape: RoutingShape | None, message: str
) -> None:
    batch = routed(make_batch(2), EXPERTS)
    check_routing(batch, SHAPE)
    group = batch.groups[1]
    longest = max(group.rollouts, key=lambda one: one.num_tokens)
    wrong = longest.with_routing(change(longest.routing))
    rollouts = tuple(wrong if one is longest else one for one in group.rollouts)
    batch = replace(batch, groups=(batch.groups[0], replace(group, rollouts=rollouts)))
    with pytest.raises(PeerError, match=message) as error:
        check_routing(batch, shape)
    if shape is not None:
        assert f"group prompt-1, sample {longest.sample_index}" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one[:-1], r"group prompt-0, prompt: experts \(.*instead of \[tokens, layers"),
        (
            lambda one: one[:, :1],
            r"group prompt-0, prompt: experts \(.*instead of \[tokens, layers",
        ),
        (lambda one: one * 0 + 8, "group prompt-0, prompt: expert 8 of 8"),
    ],
)
def test_experts_of_a_prompt_that_are_not_the_models_are_refused(
    change: Callable[[Any], Any], message: str
) -> None:
    batch = taken(routed(make_batch(2), EXPERTS), [1])
    check_routing(batch, SHAPE)
    group = batch.groups[0]
    changed = replace(group, prompt_routing=change(group.prompt_routing))
    with pytest.raises(PeerError, match=message):
        check_routing(replace(batch, groups=(changed, *batch.groups[1:])), SHAPE)


def test_samples_without_experts_are_as_they_were() -> None:
    check_routing(make_batch(2), None)
    assert packed(make_group(1)).routing is None


def test_passes_pack_the_experts_of_their_layers_only() -> None:
    cpu = torch.device("cpu")
    # This rank trains all rows but each group's first, whose experts the prompt has too.
    skipped = {0, 4}
    batch = taken(routed(make_batch(2), EXPERTS), [1, 2, 3, 5, 6, 7])

    def packed_with(layers: slice | None) -> list[PackedRouting | None]:
        cut = BatchCut(2, None, 4, routed_layers=layers)
        (mini_batch,) = split_batch(
            batch.groups, cut, ParallelContext(), step=1, device=cpu, skipped=skipped
        )
        return [one.routing for one in mini_batch.micro_batches]

    every, last = packed_with(slice(None)), packed_with(slice(1, 2))
    assert every
    for whole, part in zip(every, last, strict=True):
        assert whole is not None
        assert part is not None
        assert torch.equal(part.experts, whole.experts[1:])
        assert torch.equal(part.known, whole.known)
    assert packed_with(None) == [None] * len(every)
