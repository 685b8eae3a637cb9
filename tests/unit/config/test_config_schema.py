"""The schema itself: every field is documented, every section has a default."""

from __future__ import annotations

from typing import get_args

import pytest

from sluice.algorithm.registry import BATCH_ESTIMATORS, POLICY_OBJECTIVES
from sluice.config.loading.keys import nearest_keys
from sluice.config.run import (
    RunConfig,
    annotation_at,
    expectation,
    known_keys,
    section_type,
    text_at,
)
from sluice.config.schema.actor import PolicyLossName
from sluice.config.schema.algorithm import EstimatorName

LEAVES = [key for key in known_keys() if section_type(annotation_at(key.split("."))) is None]


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_says_what_it_does_and_what_it_takes(key: str) -> None:
    annotation = annotation_at(key.split("."))
    assert text_at(key.split(".")), f"{key} has no text below it"
    assert "typing." not in expectation(annotation)
    assert "<class" not in expectation(annotation)


def test_estimators_and_losses_are_those_of_the_registry() -> None:
    assert get_args(EstimatorName) == tuple(BATCH_ESTIMATORS)
    assert get_args(PolicyLossName) == tuple(POLICY_OBJECTIVES)


def test_the_configuration_is_frozen() -> None:
    config = RunConfig()
    with pytest.raises(AttributeError):
        config.data.train_batch_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("key", LEAVES)
def test_a_key_without_its_first_part_is_recognised(key: str) -> None:
    path = key.split(".")
    if len(path) > 2:
        assert key in nearest_keys(tuple(path[1:]))
