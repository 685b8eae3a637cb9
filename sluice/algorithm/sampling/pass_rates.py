"""The belief about prompts' pass rates: a distribution over a grid, learnt as groups end
(docs/sampling.md, "Coverage guard").

What is learnt stays right when a group was stopped after its first samples, since stopping depends
on nothing but the samples seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

HARD_BELOW = 0.1
"""Prompts with a pass rate below this are hard."""

DECAY_PER_GROUP = 0.998
PRIOR_WEIGHT = 24.0

Weights = npt.NDArray[np.float64]  # [grid], sums to 1

_LOGITS = np.linspace(-6.2, 6.2, 41)
GRID: Weights = 1.0 / (1.0 + np.exp(-_LOGITS))
"""Pass rates, 0.002 to 0.998, evenly spaced in log odds: no prompt is hopeless or certain."""

_LOG_RIGHT, _LOG_WRONG = np.log(GRID), np.log1p(-GRID)
_STEP = _LOGITS[1] - _LOGITS[0]
# A point represents its cell, and a part of the cell may be hard.
_HARD = np.clip((np.log(HARD_BELOW / (1.0 - HARD_BELOW)) - _LOGITS) / _STEP + 0.5, 0.0, 1.0)
# U-shaped, as pass rates are: log odds from "almost never" to "almost always".
_PRIOR = np.full(GRID.size, 1.0 / GRID.size)


@dataclass(frozen=True, slots=True)
class GradeCounts:
    """Graded samples of one prompt. Counts may be fractions: old evidence counts less."""

    num_right: float = 0.0
    num_wrong: float = 0.0

    def __add__(self, other: GradeCounts) -> GradeCounts:
        return GradeCounts(self.num_right + other.num_right, self.num_wrong + other.num_wrong)


@dataclass(frozen=True, slots=True, eq=False)
class PassRateBelief:
    """The population's pass rates; starts even in log odds."""

    counts: Weights = field(default_factory=lambda: np.zeros(GRID.size))

    @property
    def population(self) -> Weights:
        """Weights of the grid for a prompt without earlier attempts."""
        total = self.counts + PRIOR_WEIGHT * _PRIOR
        return np.asarray(total / total.sum(), dtype=np.float64)

    def learn(self, weighted_grades: list[tuple[GradeCounts, float]]) -> PassRateBelief:
        """Return the belief after some more groups ended, in any order.

        Args:
            weighted_grades: evidence on each group's prompt, and how many prompts of the population
                the group represents (the inverse of the probability that it was started).
        """
        if not weighted_grades:
            return self
        population = self.population
        added = sum(
            (
                weight * posterior(population, grade_counts)
                for grade_counts, weight in weighted_grades
            ),
            start=np.zeros(GRID.size),
        )
        return PassRateBelief(self.counts * DECAY_PER_GROUP ** len(weighted_grades) + added)


def posterior(population: Weights, grade_counts: GradeCounts) -> Weights:
    """Return the weights of the grid, given a prior and some graded samples of one prompt."""
    log_likelihood = grade_counts.num_right * _LOG_RIGHT + grade_counts.num_wrong * _LOG_WRONG
    weights = population * np.exp(log_likelihood - log_likelihood.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def hard_probability(weights: Weights) -> float:
    """Probability that the pass rate is below `HARD_BELOW`."""
    return float(weights @ _HARD)


def mean_pass_rate(weights: Weights) -> float:
    """Expected pass rate."""
    return float(weights @ GRID)


def all_right_probability(weights: Weights, num_samples: int) -> float:
    """Probability that all of `num_samples` further samples are right."""
    return float(weights @ _powers(num_samples)[0])


def all_wrong_probability(weights: Weights, num_samples: int) -> float:
    """Probability that all of `num_samples` further samples are wrong."""
    return float(weights @ _powers(num_samples)[1])


def mixed_probability(weights: Weights, num_samples: int) -> float:
    """Probability that `num_samples` further samples are neither all right nor all wrong."""
    all_right, all_wrong = _powers(num_samples)
    return float(1.0 - weights @ (all_right + all_wrong)) if num_samples else 0.0


@lru_cache(maxsize=64)
def _powers(num_samples: int) -> tuple[Weights, Weights]:
    return GRID**num_samples, (1.0 - GRID) ** num_samples
