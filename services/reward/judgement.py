"""Whether a graded group is kept, filtered, or has failed."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.algorithm.group_completeness import fewest_samples
from sluice.algorithm.group_filter import filter_group
from sluice.errors import ConfigError
from sluice.types import Failed, FailureKind, GradedGroup, PromptEnd, PromptOrigin


@dataclass(frozen=True, slots=True)
class Judgement:
    """`end` is how the prompt ends now; ``None``: its group is kept.

    `detail` of a failure begins with its `FailureKind` or with how many samples had one.
    """

    end: PromptEnd | None
    detail: str = ""


def judge(graded: GradedGroup, *, metric: str | None, whole_groups: bool = False) -> Judgement:
    """Apply the group filter to what could be scored.

    A group fails when fewer than `fewest_samples` were scored. It fails as well when its greedy
    response, if it has one, was not scored. That response is not filtered by.

    Args:
        graded: the group.
        metric: the filter's metric; ``None``: no filter.
        whole_groups: every sample must be scored, since the loss compares all of them.

    Raises:
        ConfigError: the scorer does not return `metric` for a prompt of the data set, as it then
            would for all of them. A client's prompt fails alone.
    """
    prompt = graded.group.prompt
    if failure := _failure(graded, whole_groups=whole_groups):
        return Judgement(PromptEnd.DROPPED_FAILED, failure)
    try:
        return Judgement(filter_group(graded, metric=metric))
    except ConfigError as error:
        if prompt.origin is PromptOrigin.CLIENT:
            return Judgement(PromptEnd.DROPPED_FAILED, f"{FailureKind.UNSCORABLE}: {error}")
        raise ConfigError(
            f"prompt {prompt.prompt_id} of data source '{prompt.data_source}': {error}"
        ) from error


def _failure(graded: GradedGroup, *, whole_groups: bool) -> str:
    """Why a group is of no use whatever its scores say; empty if it is of use."""
    num_samples, num_scored = len(graded.outcomes), len(graded.scored)
    if num_scored < fewest_samples(num_samples, whole_groups=whole_groups):
        first = next(o for o in graded.outcomes if isinstance(o, Failed))
        return (
            f"{num_samples - num_scored} of {num_samples} samples failed"
            f"{' and the loss compares whole groups' if whole_groups else ''}, the first: "
            f"{first.kind}: {first.detail}"
        )
    if not graded.group.num_response_tokens:
        return "all responses are empty"
    unscored = [o for o in graded.greedy.outcomes if isinstance(o, Failed)] if graded.greedy else []
    if unscored:
        first = unscored[0]
        return f"{first.kind}: no score of the greedy response, the baseline: {first.detail}"
    return ""
