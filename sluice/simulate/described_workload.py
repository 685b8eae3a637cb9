"""A data set by its distributions: how often prompts are solved, and how long the answers are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples

Floats = npt.NDArray[np.float64]

NUM_PROMPTS = 8192
LONG_SHARE = 0.1
"""Prompts with the longest answers, which count as long."""

_LEAST_RATE = 1e-6
"""Log odds are finite."""


@dataclass(frozen=True, slots=True)
class BetaComponent:
    """Prompts whose pass rates are drawn from Beta(alpha, beta).

    Args:
        alpha: above 0.
        beta: above 0; the mean pass rate is alpha / (alpha + beta).
        weight: how many prompts are of this kind, against the weights of the other ones.
    """

    alpha: float
    beta: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Lognormal lengths of responses, in tokens.

    A prompt with pass rate p has the median ``solved * p + unsolved * (1 - p)``, times a lognormal
    factor of its own.

    Args:
        median_tokens_solved: where every sample is right.
        median_tokens_unsolved: where none is.
        sigma_between_prompts: standard deviation of the logarithm, of prompts' own factors.
        sigma_within_prompt: the same of the samples of one prompt.
        max_tokens: a response of this length is cut off, and wrong.
    """

    median_tokens_solved: float = 1500.0
    median_tokens_unsolved: float = 3500.0
    sigma_between_prompts: float = 0.4
    sigma_within_prompt: float = 0.5
    max_tokens: int = 16_384


@dataclass(frozen=True, slots=True)
class WorkloadDescription:
    """What a data set and a policy's answers to it are drawn from.

    Args:
        pass_rates: kinds of prompts, at least one.
        lengths: of responses.
        num_prompts: rows of the data set.
        drift_per_version: log odds that every prompt's pass rate gains with a version.
    """

    pass_rates: tuple[BetaComponent, ...]
    lengths: ResponseLengths = ResponseLengths()
    num_prompts: int = NUM_PROMPTS
    drift_per_version: float = 0.002


class DescribedWorkload:
    """Prompts of a description, visited epoch after epoch in an order of each epoch's own.

    Args:
        description: the distributions.
        seed: decides prompts, orders and samples.
    """

    def __init__(self, description: WorkloadDescription, seed: int = 0) -> None:
        self._description, self._seed = description, seed
        lengths, num_prompts = description.lengths, description.num_prompts
        draws = np.random.default_rng([seed, 0])
        rates = _pass_rates(description, draws)
        self._log_odds = np.log(rates) - np.log1p(-rates)
        medians = lengths.median_tokens_solved * rates + lengths.median_tokens_unsolved * (
            1.0 - rates
        )
        factors = lengths.sigma_between_prompts * draws.standard_normal(num_prompts)
        self._log_medians = np.log(medians) + factors
        self._are_long = self._log_medians > np.quantile(self._log_medians, 1.0 - LONG_SHARE)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        """See `Workload`."""
        epoch, place = divmod(position, self._description.num_prompts)
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, 1, epoch])
            self._epoch, self._order = epoch, order.permutation(self._description.num_prompts)
        number = int(self._order[place])
        log_odds = float(self._log_odds[number]) + self._description.drift_per_version * version
        rate = float(1.0 / (1.0 + np.exp(-log_odds)))
        return SimulatedPrompt(str(number), rate, bool(self._are_long[number]), number)

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        """See `Workload`."""
        lengths = self._description.lengths
        draws = np.random.default_rng([self._seed, 2, position, num_restarts])
        deviations = lengths.sigma_within_prompt * draws.standard_normal(num_samples)
        sampled = np.exp(self._log_medians[prompt.number] + deviations)
        tokens = np.clip(np.rint(sampled), 1, lengths.max_tokens).astype(np.int64)
        are_right = (draws.random(num_samples) < prompt.pass_rate) & (tokens < lengths.max_tokens)
        return SimulatedSamples(tokens.tolist(), are_right.tolist())


def _pass_rates(description: WorkloadDescription, draws: np.random.Generator) -> Floats:
    """Of all prompts: [num_prompts]."""
    kinds, num_prompts = description.pass_rates, description.num_prompts
    weights = np.array([kind.weight for kind in kinds])
    chosen = draws.choice(len(kinds), size=num_prompts, p=weights / weights.sum())
    by_kind = np.stack([draws.beta(kind.alpha, kind.beta, num_prompts) for kind in kinds])
    rates = by_kind[chosen, np.arange(num_prompts)]
    return np.clip(rates, _LEAST_RATE, 1.0 - _LEAST_RATE)
