"""Passes in bfloat16 over float32 weights: what is cast, for how long, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from services.trainer.learner.batch import micro_batch
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from tests.support.tiny_policy import make_batch, make_config, save_model

Dtypes = set[torch.dtype]


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    config = make_config(save_model(tmp_path, "qwen3_moe"), fsdp_config={"dtype": "bfloat16"})
    return Learner(config, ParallelContext(), total_steps=10)


def layers(learner: Learner) -> Any:
    return learner._model.base_model.layers


def dtypes(values: Any) -> Dtypes:
    return {
        one.dtype for one in values if isinstance(one, torch.Tensor) and one.is_floating_point()
    }


def test_experts_compute_in_bfloat16(learner: Learner) -> None:
    """Under autocast their grouped products stayed in float32."""
    found: Dtypes = set()

    def note(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        found.update(dtypes(inputs), dtypes([output]), dtypes(module.parameters()))

    layers(learner)[0].mlp.experts.register_forward_hook(note)
    learner.train_step(make_batch(), 1)
    assert found == {torch.bfloat16}


def test_a_layers_cast_weights_are_gone_when_the_next_layer_works(learner: Learner) -> None:
    """Autocast kept those of all layers until the end of the pass."""
    held: list[tuple[bool, Dtypes]] = []

    def look(*_: object) -> None:
        first = list(layers(learner)[0].parameters())
        held.append((all(isinstance(one, DTensor) for one in first), dtypes(first)))

    layers(learner)[-1].mlp.register_forward_hook(look)
    learner.train_step(make_batch(), 1)
    assert held
    assert all(one == (True, {torch.float32}) for one in held)


def test_gradients_are_summed_in_float32(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Dtypes = set()
    optimizer = learner._optimizer
    step = optimizer.step

    def note(*arguments: Any) -> Any:
        found.update(dtypes(one.grad for one in learner._policy.parameters.values()))
        return step(*arguments)

    monkeypatch.setattr(optimizer, "step", note)
    learner.train_step(make_batch(), 1)
    assert found == {torch.float32}


def test_all_layers_of_a_pass_use_one_mask(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP would copy a layout for each layer if it cast what layers get."""
    masks: list[micro_batch.AttentionBlock] = []  # kept, or another would get its address
    make = micro_batch._mask

    def note(block: micro_batch.AttentionBlock, visible: torch.Tensor) -> torch.Tensor:
        masks.append(block)
        return make(block, visible)

    monkeypatch.setattr(micro_batch, "_mask", note)
    learner.train_step(make_batch(), 1)
    assert masks
    assert len(masks) == len(set(map(id, masks)))


@pytest.mark.parametrize("prefetches", [False, True])
def test_the_next_layer_is_gathered_when_a_layers_forward_begins(
    prefetches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dtype": "bfloat16", "forward_prefetch": prefetches}
    config = make_config(save_model(tmp_path), fsdp_config=settings)
    learner = Learner(config, ParallelContext(), total_steps=10)
    gathered: set[FSDPParamGroup] = set()
    seen: list[int] = []
    unshard = FSDPParamGroup.unshard

    def note(group: FSDPParamGroup, async_op: bool = False) -> None:
        gathered.add(group)
        unshard(group, async_op)

    monkeypatch.setattr(FSDPParamGroup, "unshard", note)
    layers(learner)[0].mlp.register_forward_hook(lambda *_: seen.append(len(gathered)))
    learner.train_step(make_batch(), 1)
    # The outer unit's and the layer's own weights are whole in any case.
    assert seen[0] == 2 + prefetches
