"""Numbers of an evaluation with their standard errors: means, unbiased pass@k, paired differences.

A benchmark's prompts count as a sample of all the prompts that could be asked, so each standard
error is over prompts: the deviation between the values of single prompts, over the root of their
number. With a single prompt there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from sluice.types import Scored

KeyT = TypeVar("KeyT")

ACCURACY, REWARD = "acc", "reward"
CORRECT_FROM = 1.0
"""A response with this accuracy or more is correct: all tests passed, the answer in its form."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over prompts.

    Attributes:
        value: the mean.
        standard_error: over prompts; null with one prompt.
        prompts: that it is over.
    """

    value: float
    standard_error: float | None
    prompts: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What is kept of a prompt: its grades, and where its texts are.

    Attributes:
        position: of its row in the benchmark.
        key: what the prompt is, the same in every evaluation of the benchmark.
        data_source: of the prompt.
        scores: of the samples that were graded.
        num_failed: samples without a grade.
        num_tokens: sampled for all of them.
        num_cut: samples that ended at the limit of their length.
        offset: of its line in the file of responses, bytes.
    """

    position: int
    key: bytes
    data_source: str
    scores: tuple[Scored, ...]
    num_failed: int
    num_tokens: int
    num_cut: int
    offset: int

    @property
    def num_samples(self) -> int:
        """All of them, graded or not."""
        return len(self.scores) + self.num_failed


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of one value per prompt; ``None`` without values."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    error = float(array.std(ddof=1) / np.sqrt(array.size)) if array.size > 1 else None
    return Estimate(float(array.mean()), error, array.size)


def estimate_text(number: Estimate | None, *, signed: bool = False) -> str:
    """Return a value with its standard error, as people read them; ``-`` for none."""
    if number is None:
        return "-"
    value = f"{number.value:{'+' if signed else ''}.3f}"
    return value if number.standard_error is None else f"{value} ± {number.standard_error:.3f}"


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that one of k samples is correct, estimated without bias from n.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021): the share of the choices of k among n samples
    with a correct one in them.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples")
    if num_samples - num_correct < k:
        return 1.0
    # The product form: binomials of many samples are beyond floats.
    largest = np.arange(num_samples - num_correct + 1, num_samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(1.0 - k / largest))


def pass_sizes(num_samples: int) -> tuple[int, ...]:
    """Return the powers of two up to `num_samples`, and `num_samples` itself."""
    powers = [1 << exponent for exponent in range(num_samples.bit_length())]
    return tuple(sorted({*powers, num_samples} if num_samples else powers))


def pass_estimates(prompts: Sequence[PromptScores], num_samples: int) -> dict[int, Estimate]:
    """Return pass@k for each k of `pass_sizes`.

    A prompt with fewer than k graded samples has no pass@k and is left out of that one.
    """
    estimates: dict[int, Estimate] = {}
    counts = [(len(prompt.scores), sum(map(is_correct, prompt.scores))) for prompt in prompts]
    for k in pass_sizes(num_samples):
        values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        if (at_k := estimate(values)) is not None:
            estimates[k] = at_k
    return estimates


def is_correct(score: Scored) -> bool:
    """Return whether a response counts as correct: by ``acc``, or by its score without it."""
    return score.metrics.get(ACCURACY, score.score) >= CORRECT_FROM


def mean_variable(prompts: Sequence[PromptScores]) -> str:
    """Return what the mean is of, verl's rule: ``acc`` where all responses have one, else
    ``reward``."""
    graded = [score for prompt in prompts for score in prompt.scores]
    return ACCURACY if all(ACCURACY in score.metrics for score in graded) else REWARD


def prompt_mean(prompt: PromptScores, variable: str) -> float | None:
    """Return a prompt's mean of `variable`; ``None``: nothing was graded."""
    if not prompt.scores:
        return None
    is_accuracy = variable == ACCURACY
    values = [score.metrics[ACCURACY] if is_accuracy else score.reward for score in prompt.scores]
    return float(np.mean(values))


def paired_difference(before: Mapping[KeyT, float], after: Mapping[KeyT, float]) -> Estimate | None:
    """Return the mean of `after` - `before` over the prompts that both have.

    Prompts differ more than checkpoints do. Differences within each prompt leave that out, so this
    standard error is smaller than those of the two means suggest.

    Args:
        before: values by the prompts' keys.
        after: the same of another evaluation.
    """
    return estimate([after[key] - before[key] for key in before if key in after])
