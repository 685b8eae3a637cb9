"""Three stages of a run as workloads: early, mid, late.

A prompt is hard, middling or easy; its pass rate is drawn from that kind's Beta distribution. Over
a run prompts move from hard to easy, so that groups that are all right become more frequent (DAPO,
figure 3b). Responses are lognormal, the longer the harder the prompt. `docs/simulator.md` has the
numbers and why.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice.errors import ConfigError
from sluice.simulate.workload import DrawnSamples, SimulatedPrompt

Floats = npt.NDArray[np.float64]

HARD, MIDDLE, EASY = (0.25, 5.0), (1.2, 1.2), (6.0, 0.25)
"""Beta distributions of the pass rate."""

MEDIAN_TOKENS_SURE, MEDIAN_TOKENS_HOPELESS = 1500.0, 3500.0
SIGMA_BETWEEN, SIGMA_WITHIN = 0.4, 0.5
MAX_TOKENS = 16_384
"""A response of this length is cut off, and wrong."""

LONG_SHARE = 0.1
DRIFT_PER_VERSION = 0.002
"""Log odds that every prompt's pass rate gains with a version."""

NUM_PROMPTS = 8192
_LEAST_RATE = 1e-6


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of hard, middling and easy prompts; they sum to 1."""

    hard: float
    middle: float
    easy: float


MIXTURES = {
    "early": Mixture(0.60, 0.30, 0.10),
    "mid": Mixture(0.32, 0.40, 0.28),
    "late": Mixture(0.20, 0.25, 0.55),
}


class MixtureWorkload:
    """Prompts of a mixture, visited epoch after epoch in an order of each epoch's own.

    Args:
        mixture: a name in `MIXTURES`.
        seed: decides prompts, orders and samples.
        num_prompts: rows of the data set.
    """

    def __init__(self, mixture: str, seed: int = 0, num_prompts: int = NUM_PROMPTS) -> None:
        if mixture not in MIXTURES:
            raise ConfigError(f"mixture '{mixture}' is none of {', '.join(MIXTURES)}")
        self._seed, self._num_prompts = seed, num_prompts
        draws = np.random.default_rng([seed, 0])
        rates = _pass_rates(MIXTURES[mixture], num_prompts, draws)
        self._log_odds = np.log(rates) - np.log1p(-rates)
        medians = MEDIAN_TOKENS_SURE * rates + MEDIAN_TOKENS_HOPELESS * (1.0 - rates)
        self._log_medians = np.log(medians) + SIGMA_BETWEEN * draws.standard_normal(num_prompts)
        self._are_long = self._log_medians > np.quantile(self._log_medians, 1.0 - LONG_SHARE)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        """See `Workload`."""
        epoch, place = divmod(position, self._num_prompts)
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, 1, epoch])
            self._epoch, self._order = epoch, order.permutation(self._num_prompts)
        number = int(self._order[place])
        log_odds = float(self._log_odds[number]) + DRIFT_PER_VERSION * version
        rate = float(1.0 / (1.0 + np.exp(-log_odds)))
        return SimulatedPrompt(str(number), rate, bool(self._are_long[number]), number)

    def samples(
        self, prompt: SimulatedPrompt, position: int, attempt: int, num_samples: int
    ) -> DrawnSamples:
        """See `Workload`."""
        draws = np.random.default_rng([self._seed, 2, position, attempt])
        lengths = np.exp(
            self._log_medians[prompt.number] + SIGMA_WITHIN * draws.standard_normal(num_samples)
        )
        tokens = np.clip(np.rint(lengths), 1, MAX_TOKENS).astype(np.int64)
        are_right = (draws.random(num_samples) < prompt.pass_rate) & (tokens < MAX_TOKENS)
        return DrawnSamples(tokens.tolist(), are_right.tolist())


def _pass_rates(mixture: Mixture, num_prompts: int, draws: np.random.Generator) -> Floats:
    shares = [mixture.hard, mixture.middle, mixture.easy]
    kinds = draws.choice(3, size=num_prompts, p=shares)
    by_kind = [draws.beta(a, b, num_prompts) for a, b in (HARD, MIDDLE, EASY)]
    return np.clip(np.choose(kinds, by_kind), _LEAST_RATE, 1.0 - _LEAST_RATE)
