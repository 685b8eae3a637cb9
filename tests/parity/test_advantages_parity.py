"""Every estimator against independent NumPy formulas in float64 on random ragged batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sluice.algorithm.advantages.inputs import AdvantageInputs, AdvantageSettings
from sluice.algorithm.registry import BATCH_ESTIMATORS, batch_estimator
from tests.support import advantage_formulas as formulas
from tests.support.advantage_formulas import NumpyBatch, Pair, random_batch

GAMMA, LAM = 0.97, 0.9
SETTINGS = AdvantageSettings(gamma=GAMMA, lam=LAM, gdpo_reward_weights=(1.0, 0.25))
SEVERAL = (4, 3, 5, 2)

FORMULAS: dict[str, Callable[[NumpyBatch], Pair]] = {
    "gae": lambda batch: formulas.gae(batch, GAMMA, LAM),
    "grpo": formulas.grpo,
    "grpo_vectorized": formulas.grpo,
    "grpo_passk": formulas.grpo_passk,
    "gdpo": formulas.gdpo,
    "reinforce_plus_plus": lambda batch: formulas.reinforce_plus_plus(batch, GAMMA),
    "reinforce_plus_plus_baseline": formulas.reinforce_plus_plus_baseline,
    "rloo": formulas.rloo,
    "rloo_vectorized": lambda batch: formulas.rloo(batch, alone=0.0),
    "opo": formulas.opo,
    "remax": formulas.remax,
    "gpg": formulas.gpg,
    "optimal_token_baseline": lambda batch: formulas.token_baseline(batch, compact=False),
    "tir_optimal_token_baseline": lambda batch: formulas.token_baseline(batch, compact=True),
    "adpo": formulas.adpo,
}


def inputs_of(batch: NumpyBatch) -> AdvantageInputs:
    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return AdvantageInputs(
        rewards=tensor(batch.rewards),
        mask=torch.tensor(batch.mask),
        group_index=torch.tensor(batch.group),
        values=tensor(batch.values),
        baselines=tensor(batch.baselines),
        old_logprobs=tensor(batch.logprobs),
        sum_pi_squared=tensor(batch.sum_pi_squared),
        importance_weights=tensor(batch.weights),
        reward_components={key: tensor(scores) for key, scores in batch.components.items()},
    )


def in_float32(batch: NumpyBatch) -> NumpyBatch:
    """The same numbers as the code under test gets, so that only its own rounding differs."""
    rounded = {
        name: getattr(batch, name).astype(np.float32).astype(np.float64)
        for name in ("rewards", "values", "baselines", "logprobs", "sum_pi_squared", "weights")
    }
    components = {
        key: scores.astype(np.float32).astype(np.float64)
        for key, scores in batch.components.items()
    }
    return NumpyBatch(mask=batch.mask, group=batch.group, components=components, **rounded)


def assert_close(found: torch.Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32
    scale = max(float(np.abs(expected).max()), 1.0)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-5, atol=1e-6 * scale)


def test_every_registered_estimator_has_a_formula() -> None:
    assert set(FORMULAS) == set(BATCH_ESTIMATORS)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_advantages_and_returns_equal_the_formula(name: str, seed: int) -> None:
    sizes = SEVERAL if name == "grpo_passk" else (4, 1, 3, 2)
    batch = in_float32(random_batch(seed, sizes))
    found = batch_estimator(name)(inputs_of(batch), SETTINGS)
    advantages, returns = FORMULAS[name](batch)
    # What stands outside of the mask is nobody's: only gae leaves numbers there.
    assert_close(found.advantages * inputs_of(batch).mask, advantages * batch.mask)
    assert_close(found.returns * inputs_of(batch).mask, returns * batch.mask)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_without_std_the_advantage_is_the_distance_from_the_groups_mean(
    name: str, seed: int
) -> None:
    batch = in_float32(random_batch(100 + seed))
    found = batch_estimator(name)(inputs_of(batch), AdvantageSettings(norm_by_std=False))
    assert_close(found.advantages, formulas.dr_grpo(batch)[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_token_baselines_without_importance_weights_weigh_one(name: str, seed: int) -> None:
    batch = in_float32(random_batch(200 + seed))
    plain = NumpyBatch(**{**vars(batch), "weights": np.ones_like(batch.weights)})
    arguments = {field: getattr(inputs_of(batch), field) for field in _token_baseline_fields()}
    found = batch_estimator(name)(AdvantageInputs(**arguments), AdvantageSettings())
    assert_close(found.advantages, FORMULAS[name](plain)[0])


def _token_baseline_fields() -> tuple[str, ...]:
    return ("rewards", "mask", "group_index", "old_logprobs", "sum_pi_squared")
