"""One prompt drawn once: what was known of it, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.algorithm.sampling.coverage_guard import Side
from sluice.algorithm.sampling.pass_rates import GradeCounts
from sluice.algorithm.sampling.prompt_memory import PromptHistory


@dataclass(frozen=True, slots=True)
class Attempt:
    """A prompt that was drawn.

    Args:
        key: names the prompt across visits.
        sequence: its place in the order of issue.
        history: of its earlier visits, where a strategy remembers them.
        first_samples: samples to draw first; 0: the prompt is passed by.
        draw_probability: with which it was drawn at all, by its history; in (0, 1].
        probability: with which it came this far, the choice about its rest included; in (0, 1].
        side, worth: of the choice it passed, for the coverage guard; the harder one's of two, its
            worth times the other's probability.
    """

    key: str
    sequence: int
    history: PromptHistory | None
    first_samples: int
    admission_probability: float = 1.0
    probability: float = 1.0
    side: Side = Side.SURE
    value: float = 1.0

    @property
    def is_skipped(self) -> bool:
        """Whether nothing is generated for it."""
        return self.first_samples == 0

    def known(self, version: int) -> GradeCounts:
        """The evidence of its earlier visits, discounted to `version`."""
        if self.history is None:
            return GradeCounts()
        aged = self.history.aged(version)
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
