"""Filter groups: what happens to samples without a score, which groups are complete enough, and
which carry a gradient (DAPO section 3.2; verl's filter_groups).

A failure never becomes a number. A sample that ended without a score is scored again, generated
again, left out of its group, or fails the whole group; the first two a bounded number of times. A
group is trained on its scored samples alone, if enough of them are left (`min_scored_samples`).

Whether tokens are too old for a batch is decided for whole groups, in `staleness`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from sluice.errors import ConfigError, DataError
from sluice.types import (
    Failed,
    FailureKind,
    GradedGroup,
    Outcome,
    PromptEnd,
    PromptOrigin,
    Scored,
)


class OutcomeAction(StrEnum):
    """The action on a sample without a score."""

    SCORE_AGAIN = "score_again"
    GENERATE_AGAIN = "generate_again"
    LEAVE_OUT = "leave_out"
    DROP_GROUP = "drop_group"


FINAL_ACTIONS = frozenset({OutcomeAction.LEAVE_OUT, OutcomeAction.DROP_GROUP})
"""The actions that end a sample."""

STRIKING_KINDS = frozenset(
    {FailureKind.SCORER_TIMEOUT, FailureKind.SCORER_CRASH, FailureKind.ENGINE_ERROR}
)
"""Failures that cost others time: a scorer process, or a replica's engine."""


SHAPED_REWARD_METRICS = ("reward", "seq_reward", "seq_final_reward")
"""verl's sums of token-level scores and rewards: all hold the overlong penalty, as does
`Scored.reward`. They differ only by a KL term in the reward, which no stage here adds."""

SCORE_METRIC = "score"
ACCURACY_METRIC = "acc"

MIN_SHARE = 0.5
MIN_SAMPLES = 2
_SHARE_DIGITS = 9  # 0.56 * 25 is 14.000000000000002, and requires 14 samples


@dataclass(frozen=True, slots=True)
class OutcomeRule:
    """The rule for failures of one kind.

    Args:
        action: the first action.
        max_attempts: how often the sample is scored (or generated) in all, if `action` repeats it.
        then: the final action after the last attempt.
    """

    action: OutcomeAction = OutcomeAction.LEAVE_OUT
    max_attempts: int = 1
    then: OutcomeAction = OutcomeAction.LEAVE_OUT

    @property
    def final(self) -> OutcomeAction:
        """The action once nothing is repeated any more."""
        return self.action if self.action in FINAL_ACTIONS else self.then

    def action_after(self, attempts: int) -> OutcomeAction:
        """Return the action for a sample that failed at each of `attempts` >= 1 attempts."""
        return self.final if attempts >= self.max_attempts else self.action


LEFT_OUT = OutcomeRule()


@dataclass(frozen=True, slots=True)
class OutcomePolicy:
    """The rules of a run; a sample whose kind of failure has no rule is left out.

    Args:
        rules: the rules by kind of failure; only rules for scoring failures may repeat a sample.
    """

    rules: Mapping[FailureKind, OutcomeRule] = field(default_factory=dict)

    def rule(self, kind: FailureKind) -> OutcomeRule:
        """Return the rule for failures of a kind."""
        return self.rules.get(kind, LEFT_OUT)

    def indexes_to_repeat(
        self, outcomes: Sequence[Outcome], attempts: int, action: OutcomeAction
    ) -> tuple[int, ...]:
        """Return the indexes in `outcomes` that `action` repeats after the given attempts at
        each."""
        return tuple(
            index
            for index, outcome in enumerate(outcomes)
            if isinstance(outcome, Failed)
            and self.rule(outcome.kind).action_after(attempts) is action
        )

    def group_failure(self, outcomes: Sequence[Outcome]) -> Failed | None:
        """Return the first failure that fails the whole group, if any.

        Call it when all attempts are over.
        """
        for outcome in outcomes:
            if (
                isinstance(outcome, Failed)
                and self.rule(outcome.kind).final is OutcomeAction.DROP_GROUP
            ):
                return outcome
        return None


@dataclass(frozen=True, slots=True)
class GroupNeeds:
    """What a group needs to be trained.

    Args:
        whole_groups: every sample must be scored, since the loss compares all of them.
        min_share: share of the samples that must be scored (`min_scored_samples`).
        policy: which failures cost the whole group, however many samples are left.
    """

    whole_groups: bool = False
    min_share: float = MIN_SHARE
    policy: OutcomePolicy = field(default_factory=OutcomePolicy)


_NO_NEEDS = GroupNeeds()


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """Whether a group is kept.

    Attributes:
        end: how the prompt ends now; ``None`` if its group is kept.
        detail: of a failure; begins with its `FailureKind` or with the number of failed samples.
    """

    end: PromptEnd | None
    detail: str = ""


def first_strike(outcomes: Collection[Outcome], *, engine_answered: bool = True) -> Failed | None:
    """Return the first failure that counts against the prompt, if any.

    Args:
        engine_answered: whether a replica answered with an error of its engine. If none did,
            replicas were lost or stalled, which shows nothing about the prompt.
    """
    kinds = STRIKING_KINDS if engine_answered else STRIKING_KINDS - {FailureKind.ENGINE_ERROR}
    return next((o for o in outcomes if isinstance(o, Failed) and o.kind in kinds), None)


def is_quarantined(strikes: int, max_strikes: int | None) -> bool:
    """Return whether a prompt has too many strikes in a row; ``None`` sets no limit.

    An attempt is a strike if its group failed with at least one striking failure. Any other result
    of a group clears earlier strikes, so that rare trouble that can hit any prompt does not add up.
    A cancelled attempt (too old, or another trainer) changes nothing.
    """
    return max_strikes is not None and strikes >= max_strikes


def filter_scores(scores: Sequence[Scored], *, metric: str | None) -> PromptEnd | None:
    """Return how a group ends if it is filtered, or ``None`` if it is kept.

    Args:
        scores: the scored samples of one group, at least one.
        metric: ``score`` (the scorer's number), ``reward``, ``seq_reward`` or ``seq_final_reward``
            (with overlong shaping), or the name of any of the scorer's metrics such as ``acc``.
            ``None``: the filter is off and every group is kept.

    Raises:
        ConfigError: a sample does not have `metric`.
        DataError: a metric is not finite.
    """
    if metric is None:
        return None
    values = [metric_value(scored, metric) for scored in scores]
    return filter_values(values, map(is_right, scores))


def filter_values(
    values: Sequence[float] | None, grades: Iterable[bool | None]
) -> PromptEnd | None:
    """Return how a group ends if it is filtered, or ``None`` if it is kept: the rule itself.

    Args:
        values: the filter's metric of each sample, at least one; ``None``: the filter is off.
        grades: `is_right` of each sample; read only if the group is filtered.
    """
    # Equality, not std > 0: the rounded std of three times 0.1 is not zero.
    if values is None or len(values) == 1 or min(values) != max(values):
        return None
    distinct_grades = set(grades)
    if distinct_grades == {True}:
        return PromptEnd.FILTERED_ALL_RIGHT
    return (
        PromptEnd.FILTERED_ALL_WRONG if distinct_grades == {False} else PromptEnd.FILTERED_UNIFORM
    )


def metric_value(scored: Scored, metric: str) -> float:
    """Return the number that `metric` names on one sample; errors as in `filter_scores`."""
    if metric in SHAPED_REWARD_METRICS:
        # As the trainer has it, and verl's filter: 0.1 + 0.2 is 0.3, and trains nothing beside it.
        value = float(np.float32(scored.reward))
    elif metric == SCORE_METRIC:
        value = scored.score
    elif metric in scored.metrics:
        value = float(scored.metrics[metric])
    else:
        available = ", ".join(sorted({SCORE_METRIC, *SHAPED_REWARD_METRICS, *scored.metrics}))
        raise ConfigError(
            f"algorithm.filter_groups.metric: the scorer returned no '{metric}'; available: "
            f"{available}; choose one of them or let the scorer return '{metric}'"
        )
    if not math.isfinite(value):
        raise DataError(f"metric '{metric}' of a sample is {value}; scorers must return numbers")
    return value


def is_right(scored: Scored) -> bool | None:
    """Return whether a sample is right; ``None`` for partial credit.

    Scores are 0 / 1 or -1 / +1.
    """
    grade = float(scored.metrics.get(ACCURACY_METRIC, scored.score))
    if grade >= 1.0:
        return True
    return False if grade <= 0.0 else None


def min_scored_samples(n: int, *, whole_groups: bool, min_share: float = MIN_SHARE) -> int:
    """Return the number of scored samples that a group needs.

    Half of the samples, and at least two of several: fewer would be a much smaller group than the
    configured one.

    Args:
        n: samples generated for a prompt, >= 1.
        whole_groups: no sample may be missing, because the loss compares all samples of a group.
        min_share: share of the samples, in [`MIN_SHARE`, 1]; a run may require more than half.
    """
    if whole_groups:
        return n
    return max(math.ceil(round(min_share * n, _SHARE_DIGITS)), min(MIN_SAMPLES, n))


def filter_group(
    graded: GradedGroup, *, metric: str | None, needs: GroupNeeds = _NO_NEEDS
) -> FilterDecision:
    """Apply the group filter to the scored samples.

    A group fails when fewer than `min_scored_samples` were scored, or when a sample failed in a way
    that costs the group. It fails as well when its greedy response, if it has one, was not scored.
    The filter does not look at that response.

    Args:
        metric: the filter's metric; ``None``: no filter.

    Raises:
        ConfigError: the scorer does not return `metric` for a prompt of the data set, as it then
            would for all of them. A client's prompt fails alone.
    """
    if failure := _failure(graded, needs):
        return FilterDecision(PromptEnd.DROPPED_FAILED, failure)
    return _filter_decision(graded, metric)


def filter_probes(
    probes: GradedGroup, *, metric: str | None, needs: GroupNeeds = _NO_NEEDS
) -> FilterDecision | None:
    """Apply the group filter to a group's first samples; return ``None`` if the rest is needed.

    The decision is how the group ends if no more samples are generated: filtered, if all graded
    samples have the same metric; failed, if no further sample can complete the group. One graded
    sample decides nothing, and neither do samples that differ.

    Raises:
        ConfigError: as in `filter_group`.
    """
    is_short = needs.whole_groups and len(probes.scored) < len(probes.outcomes)
    if is_short or needs.policy.group_failure(probes.outcomes) is not None:
        return filter_group(probes, metric=metric, needs=needs)
    if len(probes.scored) < MIN_SAMPLES:
        return None
    decision = _filter_decision(probes, metric)
    return None if decision.end is None else decision


def samples_differ(scores: Sequence[Scored], metric: str | None) -> bool:
    """Return whether these samples alone make their group mixed."""
    try:
        return len(scores) >= MIN_SAMPLES and filter_scores(scores, metric=metric) is None
    except ConfigError:
        return False  # `filter_group` reports it, with the names that the scorer does return


def _filter_decision(graded: GradedGroup, metric: str | None) -> FilterDecision:
    prompt = graded.group.prompt
    try:
        return FilterDecision(filter_scores(graded.scored, metric=metric))
    except ConfigError as error:
        if prompt.origin is PromptOrigin.CLIENT:
            return FilterDecision(PromptEnd.DROPPED_FAILED, f"{FailureKind.UNSCORABLE}: {error}")
        raise ConfigError(
            f"prompt {prompt.prompt_id} of data source '{prompt.data_source}': {error}"
        ) from error


def _failure(graded: GradedGroup, needs: GroupNeeds) -> str:
    """Return why a group cannot be trained, apart from its scores; empty if it can."""
    num_samples, num_scored = len(graded.outcomes), len(graded.scored)
    if (decisive := needs.policy.group_failure(graded.outcomes)) is not None:
        rule = f"sluice.reward.outcomes.{decisive.kind} costs the group"
        return f"{decisive.kind}: {rule}: {decisive.detail}"
    if num_scored < min_scored_samples(
        num_samples, whole_groups=needs.whole_groups, min_share=needs.min_share
    ):
        failed = next(o for o in graded.outcomes if isinstance(o, Failed))
        return (
            f"{num_samples - num_scored} of {num_samples} samples failed"
            f"{' and the loss compares whole groups' if needs.whole_groups else ''}, the first: "
            f"{failed.kind}: {failed.detail}"
        )
    if not graded.group.num_response_tokens:
        return "all responses are empty"
    unscored = [o for o in graded.greedy.outcomes if isinstance(o, Failed)] if graded.greedy else []
    if unscored:
        failed = unscored[0]
        return f"{failed.kind}: no score of the greedy response, the baseline: {failed.detail}"
    return ""
