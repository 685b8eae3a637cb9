"""Whether a graded group is kept, filtered, or has failed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice.algorithm.group_filter import filter_group
from sluice.errors import ConfigError
from sluice.types import Failed, FailureKind, GradedGroup, PromptEnd, PromptOrigin

LEAST_SCORED_SHARE = 0.5
LEAST_SCORED = 2


@dataclass(frozen=True, slots=True)
class Judgement:
    """`end` is how the prompt ends now; ``None``: its group is kept.

    `detail` of a failure begins with its `FailureKind` or with how many samples had one.
    """

    end: PromptEnd | None
    detail: str = ""


def judge(graded: GradedGroup, *, metric: str | None) -> Judgement:
    """Apply the group filter to what could be scored.

    A group fails when fewer than half of its samples (or, of more than one, fewer than two) were
    scored: what is left would be another comparison than the one that was asked for.

    Args:
        graded: the group.
        metric: the filter's metric; ``None``: no filter.

    Raises:
        ConfigError: the scorer does not return `metric` for a prompt of the data set, as it then
            would for all of them. A client's prompt fails alone.
    """
    prompt = graded.group.prompt
    num_samples, num_scored = len(graded.outcomes), len(graded.scored)
    needed = max(math.ceil(LEAST_SCORED_SHARE * num_samples), min(LEAST_SCORED, num_samples))
    if num_scored < needed:
        first = next(o for o in graded.outcomes if isinstance(o, Failed))
        return Judgement(
            PromptEnd.DROPPED_FAILED,
            f"{num_samples - num_scored} of {num_samples} samples failed, the first: "
            f"{first.kind}: {first.detail}",
        )
    if not graded.group.num_response_tokens:
        return Judgement(PromptEnd.DROPPED_FAILED, "all responses are empty")
    try:
        return Judgement(filter_group(graded, metric=metric))
    except ConfigError as error:
        if prompt.origin is PromptOrigin.CLIENT:
            return Judgement(PromptEnd.DROPPED_FAILED, f"{FailureKind.UNSCORABLE}: {error}")
        raise ConfigError(
            f"prompt {prompt.prompt_id} of data source '{prompt.data_source}': {error}"
        ) from error
