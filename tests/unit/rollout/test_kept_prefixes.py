"""The next turn of a conversation begins with what the turn before it left in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.decoder import CachedPrefix
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.kv_cache import PrefixCache
from services.rollout.engines.protocol import GenerationRequest
from tests.support.causal_lms import (
    chunks_of,
    generate,
    load_weights,
    reference_model,
    request,
    running_engine,
    save_config,
    weights_of,
)

_PROMPT = [5, 9, 23, 54]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_path: Path) -> PreTrainedModel:
    return reference_model(model_path)


def _turn(tokens: Sequence[int], affinity: str, *, max_tokens: int = 6) -> GenerationRequest:
    return replace(request(tokens, max_tokens=max_tokens), affinity=affinity)


async def _answer(engine: EmbeddedEngine, turn: GenerationRequest) -> tuple[list[int], list[float]]:
    return (await generate(engine, turn))[0]


async def _reused(engine: EmbeddedEngine, turn: GenerationRequest) -> int:
    before = engine.load().reused_tokens
    await chunks_of(engine, turn)
    return engine.load().reused_tokens - before


@pytest.mark.parametrize("family", ["qwen3", "llama_biased", "mistral", "gpt_neox"])
async def test_turns_on_a_kept_prefix_have_the_logprobs_of_a_fresh_prefill(
    family: str, tmp_path: Path
) -> None:
    model = reference_model(save_config(family, tmp_path))
    async with running_engine(tmp_path, model) as engine:
        conversations = [[5, 9, 23, 54], [8, 3], [7, 7, 7, 7, 7, 7, 2]]
        for turn in range(3):
            requests = [_turn(tokens, f"c{i}") for i, tokens in enumerate(conversations)]
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(_answer(engine, wanted)) for wanted in requests]
            for tokens, wanted, task in zip(conversations, requests, running, strict=True):
                fresh = await _answer(engine, replace(wanted, affinity=""))
                assert task.result()[0] == fresh[0]
                np.testing.assert_allclose(task.result()[1], fresh[1], atol=1e-5)
                tokens += [*fresh[0], 11 + turn, *range(turn)]
        assert engine.load().reused_tokens > 0


async def test_all_but_the_last_token_of_the_turn_before_is_reused_and_counted(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        answer, _ = await _answer(engine, _turn(_PROMPT, "a"))
        assert engine.load().prompt_tokens == 3  # the last one is fed to the first step
        continued = [*_PROMPT, *answer, 30, 31]
        assert await _reused(engine, _turn(continued, "a")) == len(_PROMPT) + len(answer) - 1
        assert engine.load().prompt_tokens == 3 + len(continued) - 1


async def test_a_branch_reuses_what_it_shares_with_the_last_turn(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        await _answer(engine, _turn(_PROMPT, "a"))
        assert await _reused(engine, _turn([*_PROMPT[:3], 40, 41], "a")) == 3
        assert await _reused(engine, _turn([60, *_PROMPT], "a")) == 0


async def test_nothing_is_kept_without_affinity_nor_for_another(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        answer, _ = await _answer(engine, _turn(_PROMPT, ""))
        continued = [*_PROMPT, *answer, 30]
        assert await _reused(engine, _turn(continued, "")) == 0
        await _answer(engine, _turn(_PROMPT, "a"))
        assert await _reused(engine, _turn(continued, "b")) == 0


@pytest.mark.parametrize("off", [{"keeps_prefixes": False}, {"batch_invariant": True}])
async def test_an_engine_that_keeps_no_prefixes_computes_every_turn(
    off: dict[str, bool], model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model, **off) as engine:
        answer, _ = await _answer(engine, _turn(_PROMPT, "a"))
        assert await _reused(engine, _turn([*_PROMPT, *answer, 30], "a")) == 0


@pytest.mark.parametrize("recompute_kv", [False, True])
async def test_kept_prefixes_survive_new_weights_as_running_samples_caches_do(
    recompute_kv: bool, model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model, recompute_kv=recompute_kv) as engine:
        answer, _ = await _answer(engine, _turn(_PROMPT, "a"))
        new = reference_model(model_path, seed=1)
        await load_weights(engine, weights_of(new, engine), 2, "two")
        reused = await _reused(engine, _turn([*_PROMPT, *answer, 30], "a"))
        assert (reused > 0) is not recompute_kv


def _prefix(tokens: Sequence[int]) -> CachedPrefix:
    return CachedPrefix(np.array(tokens, np.int64), torch.zeros(1, 1, 2, len(tokens), 1))


def test_the_least_recently_used_prefix_leaves_first_and_the_bound_holds() -> None:
    kept = PrefixCache(10)
    kept.put("a", _prefix(range(4)))
    kept.put("b", _prefix(range(4)))
    assert kept.take("a", np.arange(3)) is not None  # a part: it stays
    kept.put("c", _prefix(range(5)))
    assert kept.num_tokens == 9
    assert kept.take("b", np.arange(9)) is None
    assert kept.take("a", np.arange(9)) is not None
    kept.put("d", _prefix(range(11)))
    assert kept.take("d", np.arange(20)) is None
    assert kept.num_tokens == 5


def test_a_prefix_leaves_a_token_to_compute() -> None:
    kept = PrefixCache(10)
    kept.put("a", _prefix(range(5)))
    found = kept.take("a", np.arange(3))
    assert found is not None
    assert found.tokens.tolist() == [0, 1]
    assert found.layers[0].shape == (1, 2, 2, 1)
    assert kept.take("a", np.arange(1)) is None


def test_a_long_rest_behind_a_short_prefix_is_computed_as_a_whole_prompt() -> None:
    kept = PrefixCache(20_000)
    kept.put("a", _prefix(range(10)))
    assert kept.take("a", np.arange(20_000)) is None
    kept.put("b", _prefix(range(19_000)))
    assert kept.take("b", np.arange(20_000)) is not None


def test_a_prefix_that_is_continued_leaves_and_the_longest_one_is_taken() -> None:
    kept = PrefixCache(20)
    for tokens in ([1, 2, 3], [1, 2, 7, 8], [1]):
        kept.put("a", _prefix(tokens))
    lengths = []
    while (found := kept.take("a", np.array([1, 2, 7, 8, 9, 9]))) is not None:
        lengths.append(len(found.tokens))
        if len(lengths) == 3:
            break
    assert lengths == [4, 2, 2]
    assert kept.num_tokens == 4


async def test_more_conversations_than_slots_are_all_served_without_loss(
    model_path: Path, model: PreTrainedModel
) -> None:
    """Slots hold the longest sample, so a full cache makes samples wait, and stops none."""
    async with running_engine(model_path, model, slots=2, max_model_len=24) as engine:
        turns = [_turn([number, 9, 23], f"c{number}", max_tokens=21) for number in range(3, 12)]
        alone = [await _answer(engine, replace(turn, affinity="")) for turn in turns]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_answer(engine, turn)) for turn in turns]
        for task, (tokens, logprobs) in zip(running, alone, strict=True):
            assert task.result()[0] == tokens
            np.testing.assert_allclose(task.result()[1], logprobs, atol=1e-5)
        assert engine._in_thread()[1].loop._prefix_cache.num_tokens <= 48
