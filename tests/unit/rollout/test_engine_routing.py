"""The embedded engine's experts of a sample, as runs with routing replay R3 ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.causal_lm import build_causal_lm
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.generic_decoder import RecomputeDecoder
from services.rollout.engines.embedded.routing import RoutedDecoder
from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from sluice.errors import ConfigError
from sluice.types import RoutedExperts
from tests.support.causal_lms import (
    chunks_of,
    engine_settings,
    partial_sample,
    request,
    running_engine,
)
from tests.support.tiny_policy import make_model, save_model

PROMPT = (5, 9, 3, 14)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("qwen3_moe").requires_grad_(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


def chosen(model: PreTrainedModel, tokens: Sequence[int]) -> RoutedExperts:
    """The experts that transformers' own modules choose, [tokens, layers, k], sorted."""
    output = model(input_ids=torch.tensor([list(tokens)]), output_router_logits=True)
    best = [logits.topk(2, dim=-1).indices for logits in output.router_logits]
    return np.sort(torch.stack(best, 1).numpy().astype(np.uint8), -1)


def routed(wanted: GenerationRequest) -> GenerationRequest:
    return replace(wanted, with_routing=True)


def assert_own(model: PreTrainedModel, wanted: GenerationRequest, chunks: list[SampleChunk]) -> int:
    """Each sample's experts are those of its tokens; returns how many there were."""
    num_ended = 0
    for index in wanted.sample_indexes:
        own = [chunk for chunk in chunks if chunk.sample_index == index]
        had = [one.token_ids for one in wanted.partials if one.sample_index == index]
        tokens = np.concatenate((wanted.prompt_token_ids, *had)).tolist()
        tokens += [int(token) for chunk in own for token in chunk.token_ids]
        assert [chunk.routing is not None for chunk in own] == [
            chunk.finish_reason is not None for chunk in own
        ]
        found = own[-1].routing
        assert found is not None
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(found, -1), chosen(model, tokens[:-1]))
        num_ended += 1
    return num_ended


@pytest.mark.parametrize("prompt", [PROMPT, (8,)])
async def test_a_finished_sample_has_the_experts_of_all_tokens_but_its_last(
    prompt: tuple[int, ...], folder: Path, model: PreTrainedModel
) -> None:
    # More samples than slots: rows become free, are filled again, and move.
    wanted = routed(
        request(prompt, samples=7, max_tokens=9, ignore_eos=False, stop=tuple(range(12)))
    )
    async with running_engine(folder, model, slots=3, with_routing=True) as engine:
        chunks = await chunks_of(engine, wanted)
        scored = await chunks_of(engine, replace(wanted, with_prompt_logprobs=True))
    assert assert_own(model, wanted, chunks) == 7
    assert len({chunk.token_ids.size for chunk in chunks}) > 1, "all samples are as long"
    # The prompt's logprobs come with a pass that has its experts, too.
    assert scored[0].prompt_logprobs is not None
    assert assert_own(model, wanted, scored[1:]) == 7


async def test_a_continued_sample_has_those_of_the_pass_that_continues_it(
    folder: Path, model: PreTrainedModel
) -> None:
    partial = partial_sample(0, [11, 12])
    wanted = routed(request(PROMPT, samples=2, partials=(partial,)))
    async with running_engine(folder, model, with_routing=True) as engine:
        assert assert_own(model, wanted, await chunks_of(engine, wanted)) == 2


async def test_samples_come_without_experts_where_none_are_asked_for_or_kept(
    folder: Path, model: PreTrainedModel
) -> None:
    async with running_engine(folder, model, with_routing=True) as engine:
        assert all(chunk.routing is None for chunk in await chunks_of(engine, request(PROMPT)))
    async with running_engine(folder, model) as engine:
        chunks = await chunks_of(engine, routed(request(PROMPT)))
    assert all(chunk.routing is None for chunk in chunks)


async def test_an_engine_refuses_to_note_the_experts_of_a_dense_model(tmp_path: Path) -> None:
    settings = engine_settings(save_model(tmp_path), with_routing=True)
    with pytest.raises(ConfigError, match=r"mode=R3: .* none of a qwen3 model; set it to disabled"):
        await EmbeddedEngine(settings).start()


def test_a_model_without_a_cache_keeps_no_experts(tmp_path: Path) -> None:
    model = build_causal_lm(str(save_model(tmp_path, "qwen3_moe")), torch.device("cpu")).model
    with pytest.raises(ConfigError, match=r"mode=R3: the torch engine has no cache for this qwen3"):
        RoutedDecoder(RecomputeDecoder(model), model, 2, 16)
