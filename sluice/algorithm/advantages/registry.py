"""Advantage estimators by verl's names (`algorithm.adv_estimator`). Imports torch only on demand.

`AdvantageInputs` says what a batch may hold; each estimator's docstring which fields it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

from sluice.algorithm.on_demand import import_named

if TYPE_CHECKING:
    from sluice.algorithm.advantages.inputs import AdvantageInputs, Advantages, AdvantageSettings

_PACKAGE = "sluice.algorithm.advantages"

BATCH_ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {
        "gae": f"{_PACKAGE}.gae:gae",
        "grpo": f"{_PACKAGE}.grpo:grpo",
        "grpo_vectorized": f"{_PACKAGE}.grpo:grpo_vectorized",
        "grpo_passk": f"{_PACKAGE}.grpo_passk:grpo_passk",
        "gdpo": f"{_PACKAGE}.gdpo:gdpo",
        "reinforce_plus_plus": f"{_PACKAGE}.reinforce_plus_plus:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": (
            f"{_PACKAGE}.reinforce_plus_plus_baseline:reinforce_plus_plus_baseline"
        ),
        "rloo": f"{_PACKAGE}.rloo:rloo",
        "rloo_vectorized": f"{_PACKAGE}.rloo:rloo_vectorized",
        "opo": f"{_PACKAGE}.opo:opo",
        "remax": f"{_PACKAGE}.remax:remax",
        "gpg": f"{_PACKAGE}.gpg:gpg",
        "optimal_token_baseline": f"{_PACKAGE}.optimal_token_baseline:optimal_token_baseline",
        "tir_optimal_token_baseline": (
            f"{_PACKAGE}.tir_optimal_token_baseline:tir_optimal_token_baseline"
        ),
        "adpo": f"{_PACKAGE}.adpo:adpo",
    }
)
"""Estimators of whole batches, ``module:function``."""


class BatchAdvantages(Protocol):
    """An estimator for a whole train batch."""

    def __call__(self, inputs: AdvantageInputs, settings: AdvantageSettings, /) -> Advantages:
        """Map a padded batch to advantages and returns, both [rows, width].

        Raises:
            ConfigError: the batch lacks a field; names the estimator and the field.
        """
        ...


def batch_estimator(name: str) -> BatchAdvantages:
    """Import the estimator called `name` for whole batches.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    found = import_named(BATCH_ESTIMATORS, name, key="algorithm.adv_estimator")
    return cast("BatchAdvantages", found)
