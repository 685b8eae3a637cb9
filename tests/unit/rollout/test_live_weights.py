"""Taking over a version: from its memory or by copies, tied and fused tensors included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.engines.causal_lm import CausalLM, build_causal_lm
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.fused_decoder import FusedDecoder
from services.rollout.engines.weight_inbox import LiveWeights
from sluice.errors import EngineError
from sluice.weights.plan import WeightBuffer, plan_transfer
from tests.support.causal_lms import (
    generate,
    load_weights,
    reference_model,
    request,
    running_engine,
    save_config,
    weights_of,
)


def _model(family: str, folder: Path) -> CausalLM:
    return build_causal_lm(str(save_config(family, folder)), torch.device("cpu"))


def _buffer(model: CausalLM, folder: Path, seed: int) -> WeightBuffer:
    """A version in one piece of memory, as it is staged."""
    buffer = WeightBuffer(plan_transfer(model.layout.tensors, 4096))
    state = reference_model(folder, seed).state_dict()
    for name, tensor in buffer.tensors.items():
        tensor.copy_(state[name])
    return buffer


def _logits(model: CausalLM, decoder: FusedDecoder) -> torch.Tensor:
    prefilled = decoder.prefill([np.array([5, 9, 23], dtype=np.int64)])
    return torch.cat([part.flatten() for layer in prefilled.layers for part in layer])


@pytest.mark.parametrize("family", ["qwen3", "llama", "llama_biased"])
def test_a_decoder_computes_with_what_was_taken_over_and_nothing_is_copied(
    family: str, tmp_path: Path
) -> None:
    model = _model(family, tmp_path)
    decoder = FusedDecoder(model.model, 2, 16)
    live = LiveWeights(model)
    for seed in (1, 2):
        buffer = _buffer(model, tmp_path, seed)
        live.take(buffer.tensors)
        with torch.inference_mode():
            decoder.refresh()
            taken = _logits(model, decoder)
            fresh = FusedDecoder(reference_model(tmp_path, seed), 2, 16)
            torch.testing.assert_close(taken, _logits(model, fresh))
        memory = {t.untyped_storage().data_ptr() for t in model.model.parameters()}
        assert memory == {buffer.bucket(buffer.plan.buckets[0]).untyped_storage().data_ptr()}


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    model = _model("qwen3", tmp_path)
    (name,) = (s.name for s in model.layout.tensors if "embed_tokens" in s.name)
    assert all("lm_head" not in spec.name for spec in model.layout.tensors)
    live = LiveWeights(model)
    for seed in (1, 2):
        buffer = _buffer(model, tmp_path, seed)
        live.take(buffer.tensors)
        for tied in (model.model.lm_head.weight, model.model.model.embed_tokens.weight):
            assert tied.data_ptr() == buffer.tensors[name].data_ptr()


def _as_bfloat16(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def test_memory_that_was_taken_over_is_never_written_to(tmp_path: Path) -> None:
    model = _model("llama", tmp_path)
    live = LiveWeights(model)
    buffer = _buffer(model, tmp_path, 1)
    before = {name: tensor.clone() for name, tensor in buffer.tensors.items()}
    live.take(buffer.tensors)
    other = _as_bfloat16(_buffer(model, tmp_path, 2).tensors)
    live.take(other)
    assert all(torch.equal(buffer.tensors[name], before[name]) for name in before)
    state = model.model.state_dict()
    assert all(torch.equal(state[name], other[name].float()) for name in other)


async def test_an_engine_that_failed_in_the_middle_of_a_swap_serves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference_model(save_config("qwen3", tmp_path))
    taken = LiveWeights.take

    def take_half(self: LiveWeights, tensors: Mapping[str, torch.Tensor]) -> None:
        broken = dict(tensors)
        del broken["model.norm.weight"]
        taken(self, broken)

    engine: EmbeddedEngine
    async with running_engine(tmp_path, model) as engine:
        assert await generate(engine, request())
        monkeypatch.setattr(LiveWeights, "take", take_half)
        with pytest.raises(EngineError):
            await load_weights(engine, weights_of(model, engine), 2, "two")
        for call in (engine.check_alive(), generate(engine, request())):
            with pytest.raises(EngineError):
                await call
