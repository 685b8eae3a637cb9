"""Which built-in scorer grades which data source (verl's default routing, as far as it exists)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from services.reward.scorers import math_dapo
from sluice.errors import DataError


class Scorer(Protocol):
    """Grades one response; returns a number, or a mapping with ``score`` and further keys."""

    def __call__(
        self,
        *,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, object],
    ) -> object:
        """Grade."""
        ...


MATH_DAPO_SOURCES = frozenset({"math_dapo", "math", "math_dapo_reasoning"})
MATH_DAPO_PREFIXES = ("aime",)


def scorer_for(data_source: str) -> Scorer:
    """The built-in scorer of a data source.

    Raises:
        DataError: no built-in scorer knows it.
    """
    if data_source in MATH_DAPO_SOURCES or data_source.startswith(MATH_DAPO_PREFIXES):
        return _math_dapo
    known = ", ".join(sorted(MATH_DAPO_SOURCES))
    raise DataError(
        f"data_source '{data_source}': no built-in scorer (known: {known}, and anything that "
        "starts with 'aime'); set reward.custom_reward_function.path to a Python file that "
        "defines compute_score(data_source, solution_str, ground_truth, extra_info)"
    )


def _math_dapo(
    *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object]
) -> object:
    return math_dapo.compute_score(solution_str, ground_truth)
