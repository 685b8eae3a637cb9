"""Decide which groups carry a gradient (DAPO section 3.2; verl's filter_groups), and which are
complete enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sluice.errors import ConfigError, DataError
from sluice.types import GradedGroup, PromptEnd, Scored

SHAPED_REWARD_METRICS = ("seq_reward", "seq_final_reward")
"""verl's sums of token-level scores and rewards: both hold the overlong penalty, as does
`Scored.reward`. They differ only by a KL term in the reward, which no stage here adds."""

SCORE_METRIC = "score"
ACCURACY_METRIC = "acc"


def filter_group(graded: GradedGroup, *, metric: str | None) -> PromptEnd | None:
    """Judge the scored samples of a graded group; see `filter_scores`."""
    return filter_scores(graded.scored, metric=metric)


def filter_scores(scores: Sequence[Scored], *, metric: str | None) -> PromptEnd | None:
    """Say how a group ends if it is filtered, or ``None`` if it is kept.

    Args:
        scores: the scored samples of one group, at least one.
        metric: ``score`` (the scorer's number), ``seq_reward`` or ``seq_final_reward`` (with
            overlong shaping), or the name of any of the scorer's metrics such as ``acc``.
            ``None``: the filter is off and every group is kept.

    Raises:
        ConfigError: a sample does not have `metric`.
        DataError: a metric is not finite.
        ValueError: `scores` is empty.
    """
    if not scores:
        raise ValueError("a group without a scored sample can be neither kept nor filtered")
    if metric is None:
        return None
    values = [metric_value(scored, metric) for scored in scores]
    return filter_values(values, map(is_right, scores))


def filter_values(
    values: Sequence[float] | None, grades: Iterable[bool | None]
) -> PromptEnd | None:
    """The rule itself: how a group ends if it is filtered, or ``None`` if it is kept.

    Args:
        values: the filter's metric of each sample, at least one; ``None``: the filter is off.
        grades: `is_right` of each sample; not looked at unless the group is filtered.

    Raises:
        ValueError: `values` is empty.
    """
    # Equality, not std > 0: the rounded std of three times 0.1 is not zero.
    if values is None or len(values) == 1 or min(values) != max(values):
        return None
    return _uniform_end(set(grades))


def metric_value(scored: Scored, metric: str) -> float:
    """The number that `metric` names on one sample; errors as in `filter_scores`."""
    if metric in SHAPED_REWARD_METRICS:
        value = scored.reward
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


def _uniform_end(grades: set[bool | None]) -> PromptEnd:
    if grades == {True}:
        return PromptEnd.FILTERED_ALL_RIGHT
    if grades == {False}:
        return PromptEnd.FILTERED_ALL_WRONG
    return PromptEnd.FILTERED_UNIFORM


def is_right(scored: Scored) -> bool | None:
    """Right, wrong, or ``None``: neither (partial credit). Scores are 0 / 1 or -1 / +1."""
    grade = float(scored.metrics.get(ACCURACY_METRIC, scored.score))
    if grade >= 1.0:
        return True
    return False if grade <= 0.0 else None


LEAST_SHARE = 0.5
LEAST_SAMPLES = 2
_SHARE_DIGITS = 9  # 0.56 * 25 is 14.000000000000002, and asks for 14 samples


def fewest_samples(n: int, *, whole_groups: bool, least_share: float = LEAST_SHARE) -> int:
    """Return the number of scored samples that a group needs.

    Half of the samples, and at least two of several: a comparison among fewer would be another one
    than the configured.

    Args:
        n: samples generated for a prompt, >= 1.
        whole_groups: no sample may be missing, because the loss compares all samples of a group.
        least_share: share of the samples, in [`LEAST_SHARE`, 1]; a run may ask for more than half.
    """
    if whole_groups:
        return n
    return max(math.ceil(round(least_share * n, _SHARE_DIGITS)), min(LEAST_SAMPLES, n))
