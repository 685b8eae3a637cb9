"""Bootstrap metrics against verl's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.algorithm.validation_metrics import bootstrap_indices, majorities, prompt_metrics


def test_best_and_worst_of_k_equal_verls() -> None:
    found = prompt_metrics(np.array([1.0, 0.0, 0.0, 0.0]), None)
    assert found["mean@4"] == 0.25
    assert found["std@4"] == pytest.approx(0.4330, abs=1e-4)
    assert found["best@2/mean"] == pytest.approx(0.453)
    assert found["best@2/std"] == pytest.approx(0.49779, abs=1e-5)
    assert found["best@4/mean"] == pytest.approx(0.687)
    assert found["best@4/std"] == pytest.approx(0.46371, abs=1e-5)
    assert found["worst@2/mean"] == pytest.approx(0.072)
    assert found["worst@4/mean"] == pytest.approx(0.003)


def test_majority_of_k_equals_verls() -> None:
    found = prompt_metrics(np.array([1.0, 0.0, 1.0, 0.0]), majorities(["a", "b", "a", "c"]))
    assert found["maj@2/mean"] == pytest.approx(0.513)
    assert found["maj@4/mean"] == pytest.approx(0.598)


def test_draws_are_those_of_a_thousand_choices_after_seeding_with_42() -> None:
    state = np.random.RandomState(42)
    expected = [state.choice(7, size=4, replace=True) for _ in range(1000)]
    np.testing.assert_array_equal(bootstrap_indices(7, 4), expected)
