"""What a validation run found: one outcome per sample, and the numbers made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.algorithm.validation_metrics import ValidationPrompt, validation_metrics
from sluice.errors import PeerError
from sluice.types import Failed, FailureKind, Outcome, Prompt, RolloutGroup, Scored

MAX_FAILED_SHARE = 0.1
"""Beyond this share of failed samples the means would be those of another set of prompts."""


@dataclass(frozen=True, slots=True)
class ValidatedGroup:
    """One outcome per sample asked for; `group` is ``None`` if it could not be generated."""

    prompt: Prompt
    outcomes: tuple[Outcome, ...]
    group: RolloutGroup | None

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
    story = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    most = counts.most_common(1)[0][0]
    example = next(outcome for outcome in failed if outcome.kind is most)
    is_drawing = most in (FailureKind.ENGINE_ERROR, FailureKind.ABORTED)
    raise PeerError(
        "rollout fleet" if is_drawing else "scorer pool",
        phase,
        f"{len(failed)} of {len(outcomes)} samples failed ({story}), more than the "
        f"{MAX_FAILED_SHARE:.0%} that may be left out of the means; for example {most}: "
        f"{example.detail}",
    )


def evaluation_result(validated: Sequence[ValidatedGroup], num_examples: int) -> EvaluationResult:
    """verl's metrics over what could be scored, and `num_examples` responses at most."""
    scored = [ValidationPrompt(v.prompt.data_source, v.scored) for v in validated if v.scored]
    num_failed = sum(len(v.outcomes) - len(v.scored) for v in validated)
    counts = {
        "val-aux/num_prompts": float(len(scored)),
        "val-aux/num_failed_samples": float(num_failed),
    }
    examples = map(_example, validated[:num_examples])
    return EvaluationResult(
        validation_metrics(scored) | counts,
        [example for example in examples if example is not None],
        sum(v.group.num_response_tokens for v in validated if v.group),
    )


def _example(validated: ValidatedGroup) -> EvaluationExample | None:
    if validated.group is None:
        return None
    prompt = validated.prompt
    for rollout, outcome in zip(validated.group.rollouts, validated.outcomes, strict=True):
        if isinstance(outcome, Scored):
            asked = prompt.messages[-1].content
            return EvaluationExample(asked, rollout.text, prompt.ground_truth, outcome.score)
    return None
