"""What a validation run found: one outcome per sample, and the numbers made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.algorithm.validation_metrics import ValidationPrompt, validation_metrics
from sluice.errors import PeerError
from sluice.telemetry.sample_dump import DumpedSample
from sluice.types import Failed, FailureKind, Outcome, RolloutGroup, Scored

MAX_FAILED_SHARE = 0.1
"""Beyond this share of failed samples the means would be those of another set of prompts."""


@dataclass(frozen=True, slots=True)
class ValidatedPrompt:
    """What is kept of a prompt until the means are taken: no tokens, and texts only if asked for.

    Attributes:
        data_source: of the prompt.
        outcomes: one per sample asked for.
        num_response_tokens: generated; 0 if the group could not be generated.
        samples: to be written to a file.
    """

    data_source: str
    outcomes: tuple[Outcome, ...]
    num_response_tokens: int = 0
    samples: tuple[DumpedSample, ...] = ()

    @property
    def scored(self) -> tuple[Scored, ...]:
        """The outcomes that carry a number."""
        return tuple(o for o in self.outcomes if isinstance(o, Scored))


@dataclass(frozen=True, slots=True)
class EvaluationExample:
    """One response to look at."""

    prompt: str
    response: str
    ground_truth: str
    score: float


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Metrics by verl's names, and response tokens generated for them."""

    metrics: dict[str, float]
    examples: list[EvaluationExample]
    num_generated_tokens: int


def check_failures(outcomes: Sequence[Outcome], phase: str) -> None:
    """Raises `PeerError` if more than `MAX_FAILED_SHARE` of the samples failed."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    if len(failed) <= MAX_FAILED_SHARE * len(outcomes):
        return
    counts = Counter(outcome.kind for outcome in failed)
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    most = counts.most_common(1)[0][0]
    example = next(outcome for outcome in failed if outcome.kind is most)
    is_sampling = most in (FailureKind.ENGINE_ERROR, FailureKind.ABORTED)
    raise PeerError(
        "rollout fleet" if is_sampling else "scorer pool",
        phase,
        f"{len(failed)} of {len(outcomes)} samples failed ({summary}), more than the "
        f"{MAX_FAILED_SHARE:.0%} that may be left out of the means; for example {most}: "
        f"{example.detail}",
    )


class ValidationRun:
    """The validated prompts of one run, by position, and the examples of the first of them.

    Args:
        num_examples: responses to look at, at most.
    """

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples
        self._prompts: dict[int, ValidatedPrompt] = {}
        self._examples: dict[int, EvaluationExample] = {}

    @property
    def prompts(self) -> list[ValidatedPrompt]:
        """In the order of their positions."""
        return [self._prompts[position] for position in sorted(self._prompts)]

    def add(
        self, position: int, prompt: ValidatedPrompt, example: EvaluationExample | None
    ) -> None:
        """Note a prompt; of the examples those of the lowest positions stay."""
        self._prompts[position] = prompt
        if example is not None:
            self._examples[position] = example
            if len(self._examples) > self._num_examples:
                del self._examples[max(self._examples)]

    def result(self) -> EvaluationResult:
        """verl's metrics over what could be scored, and the examples."""
        prompts = self.prompts
        scored = [ValidationPrompt(p.data_source, p.scored) for p in prompts if p.scored]
        num_failed = sum(len(p.outcomes) - len(p.scored) for p in prompts)
        counts = {
            "val-aux/num_prompts": float(len(scored)),
            "val-aux/num_failed_samples": float(num_failed),
        }
        return EvaluationResult(
            validation_metrics(scored) | counts,
            [self._examples[position] for position in sorted(self._examples)],
            sum(p.num_response_tokens for p in prompts),
        )


def example_of(group: RolloutGroup, outcomes: Sequence[Outcome]) -> EvaluationExample | None:
    """The first response that was scored; ``None``: none was."""
    prompt = group.prompt
    for rollout, outcome in zip(group.rollouts, outcomes, strict=True):
        if isinstance(outcome, Scored):
            asked = prompt.messages[-1].content
            return EvaluationExample(asked, rollout.text, prompt.ground_truth, outcome.score)
    return None
