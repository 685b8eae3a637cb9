"""Advantage estimators by verl's names (`algorithm.adv_estimator`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from sluice.algorithm.on_demand import import_named

ADVANTAGE_ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {"grpo": "sluice.algorithm.advantages.grpo:grpo_advantages"}
)


class GroupAdvantages(Protocol):
    """An estimator that needs one group's rewards only."""

    def __call__(
        self, rewards: npt.NDArray[np.float64], *, norm_by_std: bool
    ) -> npt.NDArray[np.float64]:
        """Map rewards [samples] of one group to advantages [samples]."""
        ...


def advantage_estimator(name: str) -> GroupAdvantages:
    """Import the estimator called `name`.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    found = import_named(ADVANTAGE_ESTIMATORS, name, key="algorithm.adv_estimator")
    return cast("GroupAdvantages", found)
