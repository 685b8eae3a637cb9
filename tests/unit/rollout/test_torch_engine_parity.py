"""The engine's logprobs against a full transformers forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.causal_lm import build_causal_lm, use_float32_head
from services.rollout.engines.embedded import engine as embedded
from services.rollout.engines.embedded.decoder import DecodeBatch, Decoder
from services.rollout.engines.embedded.decoder_choice import choose_decoder
from services.rollout.engines.embedded.fused_decoder import FusedDecoder
from services.rollout.engines.embedded.generic_decoder import GenericDecoder, RecomputeDecoder
from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.weight_inbox import LiveWeights
from sluice.errors import ConfigError, InvalidRequestError
from sluice.types import SamplingParams
from tests.support.causal_lms import (
    VOCABULARY,
    chunks_of,
    engine_settings,
    expected_logprobs,
    generate,
    reference_model,
    request,
    running_engine,
    samples_of,
    save_config,
)

_DECODERS = {
    "qwen3": FusedDecoder,
    "llama": FusedDecoder,
    "qwen2": FusedDecoder,
    "llama_biased": FusedDecoder,
    "mistral": GenericDecoder,  # its sliding window is shorter than the context
    "gpt_neox": GenericDecoder,
    "gemma2": RecomputeDecoder,  # soft caps
    "gpt_oss": RecomputeDecoder,  # sinks
    "bloom": RecomputeDecoder,
}
_TOLERANCE = 1e-4


def _error(
    model: torch.nn.Module,
    wanted: GenerationRequest,
    samples: dict[int, tuple[list[int], list[float]]],
) -> float:
    prompt = wanted.prompt_token_ids.tolist()
    errors = [
        np.abs(np.array(expected_logprobs(model, prompt, tokens, wanted.sampling)) - logprobs).max()
        for tokens, logprobs in samples.values()
    ]
    return float(max(errors))


@pytest.mark.parametrize("family", _DECODERS)
async def test_behavior_logprobs_equal_a_full_forward_of_what_was_sampled_from(
    family: str, tmp_path: Path
) -> None:
    model = reference_model(save_config(family, tmp_path))
    async with running_engine(tmp_path, model) as engine:
        for cut in ((1.0, 1.0, -1), (0.7, 0.9, 20), (0.0, 1.0, -1)):
            temperature, top_p, top_k = cut
            # More samples than slots, so that rows are freed, moved and filled again.
            wanted = request(
                samples=11, temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=False
            )
            samples = await generate(engine, wanted)
            assert len(samples) == 11
            assert _error(model, wanted, samples) < _TOLERANCE


@pytest.mark.parametrize("family", _DECODERS)
async def test_logprobs_of_a_prompt_equal_a_full_forward_and_change_no_sample(
    family: str, tmp_path: Path
) -> None:
    model = reference_model(save_config(family, tmp_path))
    plain = request(range(3, 40), samples=3)
    prompt = plain.prompt_token_ids.tolist()
    async with running_engine(tmp_path, model) as engine:
        without = await generate(engine, plain)
        chunks = await chunks_of(engine, replace(plain, with_prompt_logprobs=True))
    assert {i: t for i, (t, _) in samples_of(chunks).items()} == {
        i: t for i, (t, _) in without.items()
    }
    (found,) = (chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs)
    exact = model(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    own = exact.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(found.logprobs, own, atol=_TOLERANCE)
    np.testing.assert_allclose(found.top_logprobs, exact.max(-1).values, atol=_TOLERANCE)
    np.testing.assert_array_equal(found.top_token_ids, exact.argmax(-1))


async def test_logprobs_of_a_prompt_whose_logits_are_too_many_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_MAX_PROMPT_LOGITS", 9 * VOCABULARY)
    model = reference_model(save_config("qwen3", tmp_path))
    async with running_engine(tmp_path, model) as engine:
        await generate(engine, replace(request([5] * 9), with_prompt_logprobs=True))
        await generate(engine, request([5] * 10))
        with pytest.raises(InvalidRequestError, match=r"10 tokens.* at most 9 .*name=vllm"):
            await generate(engine, replace(request([5] * 10), with_prompt_logprobs=True))


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
async def test_prompts_of_different_lengths_and_settings_share_steps_exactly(
    family: str, tmp_path: Path
) -> None:
    model = reference_model(save_config(family, tmp_path))
    rng = np.random.default_rng(0)
    requests = [
        request(
            rng.integers(0, VOCABULARY, length).tolist(),
            samples=3,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            seed=length,
        )
        for length, temperature, top_p, max_tokens in (
            (1, 1.0, 1.0, 20),
            (2, 0.7, 0.9, 3),
            (17, 0.0, 1.0, 9),
            (30, 1.3, 0.8, 18),
        )
    ]
    async with running_engine(tmp_path, model) as engine, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(generate(engine, wanted)) for wanted in requests]
    for wanted, task in zip(requests, running, strict=True):
        assert _error(model, wanted, task.result()) < _TOLERANCE


@pytest.mark.parametrize("family", _DECODERS)
def test_the_fastest_decoder_that_fits_the_model_is_chosen(family: str, tmp_path: Path) -> None:
    settings = engine_settings(save_config(family, tmp_path))
    model = build_causal_lm(settings.model_path, torch.device("cpu"), dtype=settings.dtype).model
    assert type(choose_decoder(model, 4, 48)) is _DECODERS[family]


class _WrongRotation(FusedDecoder):
    """Computes something else than the model does."""

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        shifted = DecodeBatch(
            batch.token_ids, np.maximum(batch.positions - 1, 0), batch.length, batch.history
        )
        return super().decode(shifted)


def test_a_decoder_that_differs_from_the_model_is_not_used(tmp_path: Path) -> None:
    settings = engine_settings(save_config("qwen3", tmp_path))
    model = build_causal_lm(settings.model_path, torch.device("cpu"), dtype=settings.dtype).model
    assert isinstance(choose_decoder(model, 4, 48, (_WrongRotation,)), RecomputeDecoder)


def test_a_replica_without_memory_for_its_slots_names_the_settings_that_take_it(
    tmp_path: Path,
) -> None:
    settings = engine_settings(save_config("qwen3", tmp_path))
    model = build_causal_lm(settings.model_path, torch.device("cpu"), dtype=settings.dtype).model
    with pytest.raises(ConfigError, match=r"max_num_seqs=16777216.*max_model_len 1048576.* GB"):
        choose_decoder(model, 1 << 24, 1 << 20)

    def without_memory(*_: object) -> Decoder:
        raise torch.OutOfMemoryError("of the device")

    with pytest.raises(torch.OutOfMemoryError):
        choose_decoder(model, 4, 48, (without_memory,))


def _recomputing(model: PreTrainedModel, *_: int) -> Decoder:
    return RecomputeDecoder(model)


@pytest.mark.parametrize("make", [FusedDecoder, GenericDecoder, _recomputing])
def test_a_float32_head_keeps_what_bfloat16_would_round_away(
    make: Callable[..., Decoder], tmp_path: Path
) -> None:
    settings = engine_settings(save_config("qwen3", tmp_path))
    lm = build_causal_lm(settings.model_path, torch.device("cpu"), dtype="bfloat16")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (3, 20))
    names = dict(lm.model.named_parameters()).keys()
    rounded = _teacher_forced(make(lm.model, 4, 48), tokens, start=6)
    use_float32_head(lm.model)
    logits = _teacher_forced(make(lm.model, 4, 48), tokens, start=6)
    assert dict(lm.model.named_parameters()).keys() == names
    assert not torch.equal(logits, logits.bfloat16().float())
    # The same numbers; a sum in another order may round the other way: one step of bfloat16.
    torch.testing.assert_close(logits, rounded, rtol=2**-7, atol=1e-5)


def _teacher_forced(decoder: Decoder, tokens: np.ndarray, start: int) -> torch.Tensor:
    """Logits of a batch of sequences from `start` on, [steps, rows, vocab]."""
    rows = np.arange(len(tokens))
    with torch.inference_mode():
        prefilled = decoder.prefill([row[:start] for row in tokens])
        decoder.insert(prefilled, rows, rows)
        logits = []
        for position in range(start, tokens.shape[1]):
            positions = np.full(len(rows), position)
            batch = DecodeBatch(tokens[:, position].copy(), positions, position + 1, tokens)
            logits.append(decoder.decode(batch).float())
    return torch.stack(logits)


@pytest.mark.parametrize("family", ["qwen3", "llama", "llama_biased"])
def test_fused_and_generic_decoders_agree(family: str, tmp_path: Path) -> None:
    settings = engine_settings(save_config(family, tmp_path))
    lm = build_causal_lm(settings.model_path, torch.device("cpu"), dtype=settings.dtype)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (3, 20))
    logits = []
    for make in (FusedDecoder, GenericDecoder):
        decoder = make(lm.model, 4, 48)
        LiveWeights(lm).take(reference_model(tmp_path).state_dict())
        decoder.refresh()
        logits.append(_teacher_forced(decoder, tokens, start=6))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


async def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = reference_model(save_config("qwen3", tmp_path))
    wanted = request(samples=8, max_tokens=20)
    async with running_engine(tmp_path, model, dtype="bfloat16") as engine:
        assert {spec.dtype for spec in engine.weight_layout} == {"bfloat16"}
        samples = await generate(engine, wanted)
    prompt = wanted.prompt_token_ids.tolist()
    plain = SamplingParams(1.0, 1.0, -1, 20, 0)
    differences = [
        np.abs(np.array(expected_logprobs(model, prompt, tokens, plain)) - logprobs)
        for tokens, logprobs in samples.values()
    ]
    assert np.concatenate(differences).mean() < 0.1
