"""The random numbers of samples."""

from __future__ import annotations

import numpy as np

from services.rollout.engines.sampling import sample_keys, uniforms


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
