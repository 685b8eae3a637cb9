"""Drawing tokens from logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.rollout.engines.sampling import (
    SamplingPlan,
    plan_sampling,
    sample_keys,
    sample_tokens,
    uniforms,
)

_CPU = torch.device("cpu")


def _plan(vocab: int, *rows: tuple[float, float, int]) -> SamplingPlan:
    temperature, top_p, top_k = (np.array(column) for column in zip(*rows, strict=True))
    return plan_sampling(
        temperature.astype(np.float32), top_p.astype(np.float64), top_k, vocab, _CPU
    )


def _sweep(
    logits: list[float], row: tuple[float, float, int], points: int = 4000
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of each token over evenly spaced uniforms, and the reported logprobs."""
    batch = torch.tensor([logits]).expand(points, -1)
    uniform = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    tokens, logprobs = sample_tokens(batch, _plan(len(logits), *[row] * points), uniform)
    reported = torch.full((len(logits),), -torch.inf)
    reported[tokens] = logprobs
    return torch.bincount(tokens, minlength=len(logits)) / points, reported


_LOGITS = [0.3, 2.0, -1.0, 1.1, 0.9, -30.0]


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ((1.0, 1.0, -1), [0, 1, 2, 3, 4, 5]),
        ((0.5, 1.0, -1), [0, 1, 2, 3, 4, 5]),
        ((1.0, 1.0, 3), [1, 3, 4]),
        ((1.0, 0.7, -1), [1, 3]),
        ((0.7, 0.5, 2), [1]),
        ((2.0, 0.9, 4), [0, 1, 3, 4]),
        ((1.0, 1e-9, -1), [1]),
        ((1.0, 1.0, 100), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_shares_and_logprobs_are_those_of_the_renormalised_kept_tokens(
    row: tuple[float, float, int], kept: list[int]
) -> None:
    expected = torch.full((len(_LOGITS),), -torch.inf)
    expected[kept] = (torch.tensor(_LOGITS)[kept] / row[0]).log_softmax(-1)
    shares, reported = _sweep(_LOGITS, row)
    assert (shares - expected.exp()).abs().max() < 5e-4
    sampled = shares > 0
    torch.testing.assert_close(reported[sampled], expected[sampled], atol=1e-6, rtol=1e-6)


def test_tokens_tied_with_the_last_kept_one_are_kept() -> None:
    shares, _ = _sweep([1.0, 0.0, 0.0, -1.0], (1.0, 1.0, 2))
    assert (shares > 0).tolist() == [True, True, True, False]
    # The first token has 0.534: 0.6 is reached within the tie.
    shares, _ = _sweep([1.0, 0.0, 0.0, -1.0], (1.0, 0.6, -1))
    assert (shares > 0).tolist() == [True, True, True, False]


def test_temperature_zero_takes_the_best_token_with_the_logprob_of_temperature_one() -> None:
    shares, reported = _sweep(_LOGITS, (0.0, 0.1, 1), points=50)
    assert shares[1] == 1
    assert float(reported[1]) == pytest.approx(float(torch.tensor(_LOGITS).log_softmax(-1)[1]))


def test_the_uniform_ends_stay_inside_the_kept_tokens() -> None:
    logits = torch.tensor([[-200.0, 1.0, 0.5, -200.0]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    for row in ((1.0, 1.0, -1), (1.0, 0.99, -1)):
        tokens, logprobs = sample_tokens(logits, _plan(4, row, row), uniform)
        assert tokens.tolist() == [1, 2]
        assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("vocab", [127, 128, 129, 1000, 151_936])
def test_a_draw_inverts_the_cumulative_distribution_of_the_whole_vocabulary(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(200, vocab, generator=generator) * 4
    uniform = torch.rand(200, dtype=torch.float64, generator=generator)
    tokens, logprobs = sample_tokens(logits, SamplingPlan(), uniform)
    shares = logits.double().softmax(-1)
    above = shares.cumsum(-1).gather(1, tokens[:, None]).squeeze(1)
    sampled = shares.gather(1, tokens[:, None]).squeeze(1)
    # Sums of float32 probabilities are right to some 1e-7.
    assert (above > uniform - 1e-6).all()
    assert (above - sampled <= uniform + 1e-6).all()
    torch.testing.assert_close(logprobs, sampled.log().float(), atol=1e-5, rtol=1e-5)


def test_the_tail_of_a_large_vocabulary_is_sampled_as_often_as_it_is_probable() -> None:
    # 65,536 tokens of 1.2e-10 each, less than a float32 sum near 1 can tell apart.
    logits = torch.full((1, 65_536 + 128), -22.85)
    logits[0, 0] = 0.0
    tail = float(logits.double().softmax(-1)[0, 1:].sum())
    points = logits.shape[1] // 128
    uniform = 1.0 - tail + tail * (torch.arange(points, dtype=torch.float64) + 0.5) / points
    tokens, _ = sample_tokens(logits.expand(points, -1), SamplingPlan(), uniform)
    # Sums of float32 probabilities shift the tail's beginning, by less than a hundredth of it.
    assert (tokens > 0).float().mean() > 0.98
    spread = tokens[tokens > 0].double()
    assert len((spread // 128).unique()) > 0.95 * points
    assert float(spread.mean()) == pytest.approx(logits.shape[1] / 2, rel=0.03)


def test_tokens_and_blocks_without_probability_are_never_sampled() -> None:
    logits = torch.full((700,), -torch.inf)
    # Within a block, at both ends of one, and in the last, smaller one; all others are empty, the
    # first one too.
    possible = [133, 134, 256, 383, 641, 699]
    logits[possible] = torch.tensor([0.0, 1.0, -3.0, 0.5, 2.0, -1.0])
    shares, _ = _sweep(logits.tolist(), (1.0, 1.0, -1))
    assert shares.nonzero().squeeze(1).tolist() == possible
    first, _ = sample_tokens(logits[None], SamplingPlan(), torch.zeros(1, dtype=torch.float64))
    assert first.tolist() == possible[:1]
    assert (shares - logits.softmax(-1)).abs().max() < 5e-4


def test_a_point_right_below_the_end_of_a_block_does_not_leave_the_blocks_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    possible = torch.tensor([3, 200, 400])
    logits = torch.full((5000, 512), -torch.inf)
    # Far apart, so that differences of sums are rounded.
    logits[:, possible] = torch.randn(5000, 3, generator=generator) * 12
    ends = logits.softmax(-1).double().cumsum(-1)[:, possible]
    for block in range(len(possible)):
        below = torch.nextafter(ends[:, block] / ends[:, -1], torch.tensor(0.0).double())
        tokens, _ = sample_tokens(logits, SamplingPlan(), below.clamp(0, 1 - 2.0**-52))
        assert set(tokens.tolist()) <= set(possible.tolist())


@pytest.mark.parametrize("vocab", [100, 256])
def test_a_batch_without_rows_samples_nothing(vocab: int) -> None:
    tokens, logprobs = sample_tokens(
        torch.empty(0, vocab), SamplingPlan(), torch.empty(0, dtype=torch.float64)
    )
    assert tokens.shape == logprobs.shape == (0,)


def test_a_row_gets_the_same_bits_whatever_other_rows_ask_for() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 333, generator=generator) * 3
    uniform = torch.rand(7, dtype=torch.float64, generator=generator)
    rows = [
        (1.0, 1.0, -1),
        (0.7, 0.9, 20),
        (0.7, 1.0, 5),
        (1.3, 0.5, -1),
        (0.0, 1.0, -1),
        (0.9, 0.8, 50),
        (1.0, 1.0, -1),
    ]
    tokens, logprobs = sample_tokens(logits, _plan(333, *rows), uniform)
    for subset in ([0], [1, 2], [3], [4, 5], [6, 1, 0]):
        some = sample_tokens(
            logits[subset], _plan(333, *(rows[i] for i in subset)), uniform[subset]
        )
        assert torch.equal(some[0], tokens[subset])
        assert torch.equal(some[1], logprobs[subset])


def test_the_tail_of_a_large_vocabulary_is_sampled_at_its_share() -> None:
    vocab = 200_000
    logits = torch.zeros(1, vocab)
    logits[0, 0] = math.log(1e9)  # each of the others: 1e-9, below float32's step at 1
    uniform = torch.tensor([1 - 1e-4], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, _plan(vocab, (1.0, 1.0, -1)), uniform)
    assert int(tokens[0]) == pytest.approx(vocab * 0.5, rel=0.05)
    assert float(logprobs[0]) == pytest.approx(-math.log(1e9), abs=1e-3)


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    uniform = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    plan = _plan(50, *[(1.0, 1.0, -1)] * 3)
    tokens, logprobs = sample_tokens(logits, plan, uniform)
    exact, expected = sample_tokens(logits.float(), plan, uniform)
    assert torch.equal(tokens, exact)
    assert torch.equal(logprobs, expected)


def _grid(seed: int, samples: int, tokens: int) -> np.ndarray:
    keys = np.repeat(sample_keys(seed, range(samples)), tokens)
    return uniforms(keys, np.tile(np.arange(tokens), samples)).reshape(samples, tokens)


def test_a_number_depends_on_seed_sample_and_token_only() -> None:
    alone = uniforms(sample_keys(5, [3]), np.array([9]))
    assert _grid(5, 8, 16)[3, 9] == alone[0]


def test_other_seeds_samples_and_tokens_give_other_numbers() -> None:
    numbers = np.concatenate([_grid(seed, 20, 50).ravel() for seed in (0, 1, -1, 1 << 63)])
    assert np.unique(numbers).size == numbers.size


def test_numbers_are_uniform_and_uncorrelated_between_neighbours() -> None:
    grid = _grid(0, 300, 300)
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    expected = grid.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19 degrees, 99.9 %
    for first, second in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.015


def test_no_number_reaches_one_in_a_product_with_a_mass() -> None:
    largest = 1 - 2.0**-52
    for mass in (1.0, 0.7, np.nextafter(1.0, 2.0), np.nextafter(0.5, 0.0), 3.3e-5):
        assert largest * mass < mass
    assert _grid(1, 100, 100).max() <= largest
