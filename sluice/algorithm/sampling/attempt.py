"""An attempt at a prompt: the evidence of earlier attempts, the decision, the end."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.algorithm.sampling.coverage_guard import Side
from sluice.algorithm.sampling.pass_rates import GradeCounts

KEPT_PER_VERSION = 0.995
"""An attempt counts this much less for each version between its own and the present one: half after
about 140. The policy learns, so that samples of another one say less about what it would answer;
one that begins again in the folder of an earlier run is as far from that run's last attempts."""


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """Earlier attempts of a prompt, as of `version`.

    `num_right` and `num_wrong` are discounted counts of graded samples, `mean_tokens` the mean
    length of their responses.
    """

    num_right: float
    num_wrong: float
    mean_tokens: float
    version: int
    num_attempts: int

    def discounted(self, version: int) -> PromptHistory:
        """Return the same with the counts discounted to `version`, an older or a younger one."""
        factor = KEPT_PER_VERSION ** abs(version - self.version)
        return PromptHistory(
            self.num_right * factor,
            self.num_wrong * factor,
            self.mean_tokens,
            version,
            self.num_attempts,
        )


@dataclass(frozen=True, slots=True)
class RememberedAttempt:
    """One attempt that has ended: its addition to a history, which may have grown meanwhile.

    `num_scored` samples were graded, `num_right` of them right, with `mean_tokens` tokens each in
    the mean; `version` was announced at the end.
    """

    num_right: int
    num_scored: int
    mean_tokens: float
    version: int


def update_history(history: PromptHistory | None, attempt: RememberedAttempt) -> PromptHistory:
    """Return the history after one more attempt; ``None``: there was none before."""
    earlier = (history or PromptHistory(0.0, 0.0, 0.0, attempt.version, 0)).discounted(
        attempt.version
    )
    earlier_weight = earlier.num_right + earlier.num_wrong
    total = earlier_weight + attempt.num_scored
    mean = earlier.mean_tokens * earlier_weight + attempt.mean_tokens * attempt.num_scored
    return PromptHistory(
        earlier.num_right + attempt.num_right,
        earlier.num_wrong + attempt.num_scored - attempt.num_right,
        mean / total if total else 0.0,
        earlier.version,
        earlier.num_attempts + 1,
    )


@dataclass(frozen=True, slots=True)
class Attempt:
    """The strategy's decision about one attempt at a prompt.

    Args:
        key: names the prompt across attempts.
        sequence: its number in the order of issue.
        history: its earlier attempts, if the strategy remembers them.
        first_samples: samples to generate first; 0: the prompt is skipped.
        admission_probability: the probability that it is not skipped, by its history; in (0, 1].
        probability: with which it came this far, the choice about its rest included; in (0, 1].
        side, value: of the choice it passed, for the coverage guard; of two choices those of the
            harder one, its value times the other's probability.
    """

    key: str
    sequence: int
    history: PromptHistory | None
    first_samples: int
    admission_probability: float = 1.0
    probability: float = 1.0
    side: Side = Side.NONE
    value: float = 1.0

    def earlier_grades(self, version: int) -> GradeCounts:
        """Return the grades of its earlier attempts, discounted to `version`."""
        if self.history is None:
            return GradeCounts()
        aged = self.history.discounted(version)
        return GradeCounts(aged.num_right, aged.num_wrong)


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """A group that was kept or filtered, or stopped after its first samples.

    `version` is the policy version announced at its end.
    """

    attempt: Attempt
    grade_counts: GradeCounts
    mean_tokens: float
    kept: bool
    version: int
