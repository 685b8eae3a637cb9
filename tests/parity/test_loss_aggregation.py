"""Aggregation, entropy bonus and KL term against formulas in float64, however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective, aggregate, total_loss
from sluice.algorithm.losses.settings import PolicyLossSettings
from sluice.algorithm.token_statistics import LinearHead, token_statistics

FACTOR = 7.0
MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]


def formula(rows: list[list[float]], mode: str) -> float:
    """Row by row, empty rows counted."""
    tokens = [x for row in rows for x in row]
    if mode == "token-mean":
        return sum(tokens) / len(tokens)
    if mode == "token-sum":
        return sum(tokens)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows if row) / len(rows)
    return sum(tokens) / len(rows) / (FACTOR if mode == "seq-mean-token-sum-norm" else 1.0)


def random_rows(lengths: list[int], seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(n) * 3).tolist() for n in lengths]


def flat(rows: list[list[float]]) -> torch.Tensor:
    tokens = [x for row in rows for x in row]
    return torch.tensor(tokens, dtype=torch.float64, requires_grad=True)


def share(
    rows: list[list[float]], counts: GlobalCounts, mode: str, dtype: torch.dtype
) -> torch.Tensor:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return aggregate(
        flat(rows).detach().to(dtype),
        torch.arange(len(rows)).repeat_interleave(lengths),
        counts,
        mode,
        FACTOR,
    )


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(MODES),
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(0, 2**31),
    st.data(),
)
def test_ranks_add_up_to_the_single_batch_whatever_the_cut(
    mode: str, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    rows = random_rows(lengths, seed)
    num_ranks = data.draw(st.integers(1, 4), label="ranks")
    places = data.draw(
        st.lists(
            st.tuples(st.integers(0, num_ranks - 1), st.integers(0, 3)),
            min_size=len(rows),
            max_size=len(rows),
        ),
        label="rank and micro-batch of each row",
    )
    counts, total = GlobalCounts(sum(lengths), len(rows)), 0.0
    for rank, micro in set(places):
        mine = [row for row, place in zip(rows, places, strict=True) if place == (rank, micro)]
        total += share(mine, counts, mode, torch.float64).item()
    assert total == pytest.approx(formula(rows, mode), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_float32_equals_the_formula(mode: str, seed: int) -> None:
    rows = [[abs(x) for x in row] for row in random_rows([4, 0, 9, 1, 30], seed)]
    found = share(rows, GlobalCounts(44, 5), mode, torch.float32)
    assert found.item() == pytest.approx(formula(rows, mode), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("entropy_coeff", "kl_coef"), [(0.0, 0.0), (0.01, 0.0), (0.02, 0.3)])
def test_total_loss_subtracts_the_bonus_and_adds_the_penalty(
    mode: str, entropy_coeff: float, kl_coef: float
) -> None:
    lengths = [2, 5, 3]
    entropies, divergences = random_rows(lengths, 1), random_rows(lengths, 2)
    inputs, counts = ragged_inputs(lengths), GlobalCounts(10, 3)
    flat_entropy = flat(entropies)
    flat_kl = flat(divergences)
    found = total_loss(
        PolicyObjective(torch.tensor(-0.4, dtype=torch.float64, requires_grad=True), {}),
        inputs,
        counts,
        PolicyLossSettings(loss_agg_mode=mode, loss_scale_factor=FACTOR),
        entropy=flat_entropy,
        entropy_coeff=entropy_coeff,
        kl=flat_kl,
        kl_loss_coef=kl_coef,
    )
    bonus, penalty = formula(entropies, mode), formula(divergences, mode)
    expected = -0.4 - entropy_coeff * bonus + kl_coef * penalty
    assert found.total.item() == pytest.approx(expected, rel=1e-9)
    assert found.policy.item() == -0.4
    assert found.entropy is not None
    assert found.kl is not None
    assert found.entropy.item() == pytest.approx(bonus, rel=1e-9)
    assert found.kl.item() == pytest.approx(penalty, rel=1e-9)
    reported = (found.policy, found.entropy, found.kl)
    assert not any(value.requires_grad for value in reported)
    found.total.backward()
    assert (flat_entropy.grad is None) == (entropy_coeff == 0.0)
    assert (flat_kl.grad is None) == (kl_coef == 0.0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_the_bonus_reaches_the_logits(temperature: float) -> None:
    inputs = ragged_inputs([2, 3])
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    # With the identity as the head, hidden states are logits.
    statistics = token_statistics(
        logits,
        LinearHead(torch.eye(6)),
        torch.zeros(5, dtype=torch.int64),
        temperature,
        with_entropy=True,
        entropy_gradient=True,
        block_tokens=2,
    )
    found = total_loss(
        PolicyObjective(torch.zeros(()), {}),
        inputs,
        GlobalCounts(5, 2),
        PolicyLossSettings(),
        entropy=statistics.entropy,
        entropy_coeff=0.5,
    )
    found.total.backward()
    z = logits.detach().double().numpy() / temperature
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1, keepdims=True)
    slope = 0.5 / 5 * p * (np.log(p) + entropy) / temperature
    assert found.total.item() == pytest.approx(-0.5 * entropy.mean(), rel=1e-5)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), slope, rtol=1e-4, atol=1e-7)


def ragged_inputs(lengths: list[int]) -> LossInputs:
    zeros = torch.zeros(sum(lengths), dtype=torch.float64)
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return LossInputs(zeros, zeros, zeros, index, len(lengths))
