"""A sample's bits do not depend on what else runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.engines.embedded.batch_invariance import DecodeShapes, prove_shapes
from services.rollout.engines.embedded.decoder import DecodeBatch
from services.rollout.engines.embedded.generic_decoder import RecomputeDecoder
from sluice.errors import ConfigError
from tests.support.causal_lms import (
    VOCABULARY,
    Samples,
    generate,
    reference_model,
    request,
    running_engine,
    save_config,
)


def _crowd(seed: int) -> list[tuple[tuple[int, ...], int, float, int]]:
    """Prompts, sample counts, temperatures and lengths of other requests."""
    rng = np.random.default_rng(seed)
    return [
        (
            tuple(rng.integers(0, VOCABULARY, rng.integers(1, 30)).tolist()),
            int(rng.integers(1, 9)),
            float(rng.choice([0.0, 0.7, 1.0])),
            int(rng.integers(1, 18)),
        )
        for _ in range(12)
    ]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_neox"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_samples_tokens_and_logprobs_are_the_same_bits_in_any_company(
    family: str, dtype: str, tmp_path: Path
) -> None:
    model = reference_model(save_config(family, tmp_path))
    prompt = (5, 9, 23, 54, 2, 88)
    settings = {"slots": 24, "dtype": dtype, "batch_invariant": True}
    async with running_engine(tmp_path, model, **settings) as engine:

        async def run(samples: tuple[int, ...], company: int | None = None) -> Samples:
            others = [] if company is None else _crowd(company)
            async with asyncio.TaskGroup() as tasks:
                for tokens, count, heat, length in others:
                    other = request(tokens, count, temperature=heat, max_tokens=length, seed=9)
                    tasks.create_task(generate(engine, other))
                wanted = request(prompt, samples, max_tokens=40, temperature=0.7)
                mine = tasks.create_task(generate(engine, wanted))
            return mine.result()

        alone = await run((0, 1, 2, 3))
        assert await run((2,)) == {2: alone[2]}
        assert await run((0, 1, 2, 3), company=1) == alone
        assert await run((3, 1), company=2) == {3: alone[3], 1: alone[1]}


async def test_prompts_are_prefilled_one_by_one(tmp_path: Path) -> None:
    model = reference_model(save_config("qwen3", tmp_path))
    async with running_engine(tmp_path, model, batch_invariant=True) as engine:
        decoder, batches = engine._in_thread()[1].loop._decoder, []
        original = decoder.prefill
        decoder.prefill = lambda prompts, images: (
            batches.append(len(prompts)),
            original(prompts, images),
        )[1]
        async with asyncio.TaskGroup() as tasks:
            for prompt in ([5, 9, 23], [8, 2, 4], [1, 1]):
                tasks.create_task(generate(engine, request(prompt)))
    assert batches == [1, 1, 1]


async def test_two_engines_give_the_same_bits(tmp_path: Path) -> None:
    model = reference_model(save_config("qwen3", tmp_path))
    results = []
    for slots in (24, 24):
        async with running_engine(tmp_path, model, slots=slots, batch_invariant=True) as engine:
            results.append(await generate(engine, request(samples=30, max_tokens=40)))
    assert results[0] == results[1]


class _PlaceDependent(RecomputeDecoder):
    """Gives every row its own rounding."""

    def __init__(self) -> None:
        self.wrong_width: int | None = None

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        width = len(batch.positions)
        logits = torch.from_numpy(batch.token_ids[:, None] * np.ones(8)).float()
        if width == self.wrong_width:
            logits[-1] = torch.nextafter(logits[-1], torch.tensor(np.inf))
        return logits


def test_a_shape_whose_rows_differ_by_one_rounding_is_not_used() -> None:
    decoder = _PlaceDependent()
    decoder.wrong_width = 8
    shapes = prove_shapes(decoder, 32, 64, VOCABULARY, torch.float32)
    assert shapes.widths == (4, 12, 16, 20, 24, 28, 32)
    assert shapes.lengths == (16, 32, 48, 64)


def test_an_engine_whose_largest_shape_fails_is_refused() -> None:
    decoder = _PlaceDependent()
    decoder.wrong_width = 32
    with pytest.raises(ConfigError, match="batch_invariant"):
        prove_shapes(decoder, 32, 64, VOCABULARY, torch.float32)


def test_rows_and_lengths_are_padded_to_the_next_proven_shape() -> None:
    shapes = DecodeShapes((4, 8, 10), (16, 32, 40))
    assert [
        shapes.padded_shape(*shape) for shape in ((1, 1), (4, 16), (5, 17), (9, 33), (10, 40))
    ] == [
        (4, 16),
        (4, 16),
        (8, 32),
        (10, 40),
        (10, 40),
    ]


async def test_an_architecture_whose_arithmetic_depends_on_other_rows_is_refused(
    tmp_path: Path,
) -> None:
    save_config("gpt_oss", tmp_path)
    with pytest.raises(ConfigError, match="mixture of experts"):
        async with running_engine(tmp_path, batch_invariant=True):
            pass
