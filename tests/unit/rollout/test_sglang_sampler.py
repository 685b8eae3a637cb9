"""Tokens drawn in SGLang's scheduler are those the embedded engine would have drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engines.sampling import plan_sampling, sample_keys, sample_tokens, uniforms
from services.rollout.engines.sglang.sampler import sample_rows, stream_seed, uniform_rows

_VOCAB = 50


@given(
    seed=st.integers(-(2**70), 2**70),
    index=st.integers(0, 2**31),
    prompt=st.integers(1, 2**20),
    token=st.integers(0, 2**20),
)
def test_a_tokens_number_is_that_of_seed_sample_and_token_wherever_it_stands(
    seed: int, index: int, prompt: int, token: int
) -> None:
    stream = stream_seed(seed, index, prompt)
    assert -(2**63) <= stream < 2**63
    found = uniform_rows(torch.tensor([stream]), torch.tensor([prompt + token - 1]))
    expected = uniforms(sample_keys(seed, [index]), np.array([token]))
    assert found.dtype == torch.float64
    assert found.item() == expected[0]


@pytest.mark.parametrize(
    "rows",
    [
        [(1.0, 1.0, -1)],
        [(0.7, 0.9, -1), (1.0, 1.0, -1), (0.0, 1.0, -1)],
        [(0.6, 0.8, 20), (1.3, 1.0, 5)],
        [(0.0, 1.0, -1), (0.9, 1.0, 3)],
        [(0.8, 0.95, -1), (0.6, 0.8, 20), (1.0, 1.0, -1), (0.0, 1.0, -1)],
    ],
)
def test_rows_are_drawn_and_scored_as_by_the_embedded_engine(
    rows: list[tuple[float, float, int]],
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(rows), _VOCAB, generator=generator) * 3
    temperature, top_p, top_k = (np.array(column) for column in zip(*rows, strict=True))
    plan = plan_sampling(temperature.astype(np.float32), top_p, top_k, _VOCAB, torch.device("cpu"))
    greedy = temperature == 0
    # What SGLang makes of a temperature of 0 and of no top-k.
    ks = np.where(greedy, 1, np.where(top_k < 0, 1 << 30, top_k))
    most = int(ks.max()) if (ks < _VOCAB).all() else None
    for uniform in np.linspace(0, 1 - 2**-52, 97):
        at = torch.full((len(rows),), float(uniform), dtype=torch.float64)
        found = sample_rows(
            logits,
            torch.from_numpy(np.where(greedy, 1.0, temperature)[:, None]).float(),
            torch.from_numpy(ks).int(),
            torch.from_numpy(top_p).float(),
            most,
            at,
        )
        expected = sample_tokens(logits, plan, at)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
