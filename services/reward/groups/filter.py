"""Decide whether a graded group is kept, filtered or failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.reward.groups.settings import GroupNeeds
from sluice.algorithm.groups.filter import (
    LEAST_SAMPLES,
    fewest_samples,
    filter_group,
    filter_scores,
)
from sluice.errors import ConfigError
from sluice.telemetry.tracing import TRACER, Key, Span, SpanName
from sluice.types import Failed, FailureKind, GradedGroup, PromptEnd, PromptOrigin, Scored


@dataclass(frozen=True, slots=True)
class Judgement:
    """`end` is how the prompt ends now; ``None``: its group is kept.

    `detail` of a failure begins with its `FailureKind` or with how many samples had one.
    """

    end: PromptEnd | None
    detail: str = ""


_NO_NEEDS = GroupNeeds()


def judge(graded: GradedGroup, *, metric: str | None, needs: GroupNeeds = _NO_NEEDS) -> Judgement:
    """Apply the group filter to what could be scored.

    A group fails when fewer than `fewest_samples` were scored, or when a sample failed in a way
    that costs the group. It fails as well when its greedy response, if it has one, was not scored.
    That response is not filtered by.

    Args:
        graded: the group.
        metric: the filter's metric; ``None``: no filter.
        needs: what the group has to have.

    Raises:
        ConfigError: the scorer does not return `metric` for a prompt of the data set, as it then
            would for all of them. A client's prompt fails alone.
    """
    with TRACER.stage(SpanName.FILTER) as span:
        failure = _failure(graded, needs)
        if failure:
            verdict = Judgement(PromptEnd.DROPPED_FAILED, failure)
        else:
            verdict = _filtered(graded, metric)
        _notify(span, verdict)
    return verdict


def judge_probes(
    probes: GradedGroup, *, metric: str | None, needs: GroupNeeds = _NO_NEEDS
) -> Judgement | None:
    """What a group's first samples say about it; ``None``: the rest is needed.

    A judgement is how the group would end if no more were generated: filtered, if all graded
    samples have the same metric, or failed, if nothing that comes could make the group whole. A
    lone graded sample decides nothing, and neither do samples that differ.

    Raises:
        ConfigError: as `judge`.
    """
    is_short = needs.whole_groups and len(probes.scored) < len(probes.outcomes)
    if is_short or needs.policy.decisive(probes.outcomes) is not None:
        return judge(probes, metric=metric, needs=needs)
    if len(probes.scored) < LEAST_SAMPLES:
        return None
    with TRACER.stage(SpanName.FILTER) as span:
        verdict = _filtered(probes, metric)
        _notify(span, verdict)
    return None if verdict.end is None else verdict


def samples_differ(scores: Sequence[Scored], metric: str | None) -> bool:
    """Whether a group with these samples is mixed, whatever its others are."""
    try:
        return len(scores) >= LEAST_SAMPLES and filter_scores(scores, metric=metric) is None
    except ConfigError:
        return False  # the judgement of the whole group names what is missing


def _notify(span: Span, verdict: Judgement) -> None:
    span.set({Key.PROMPT_END: "none" if verdict.end is None else verdict.end.value})


def _filtered(graded: GradedGroup, metric: str | None) -> Judgement:
    prompt = graded.group.prompt
    try:
        return Judgement(filter_group(graded, metric=metric))
    except ConfigError as error:
        if prompt.origin is PromptOrigin.CLIENT:
            return Judgement(PromptEnd.DROPPED_FAILED, f"{FailureKind.UNSCORABLE}: {error}")
        raise ConfigError(
            f"prompt {prompt.prompt_id} of data source '{prompt.data_source}': {error}"
        ) from error


def _failure(graded: GradedGroup, needs: GroupNeeds) -> str:
    """Why a group is of no use whatever its scores say; empty if it is of use."""
    num_samples, num_scored = len(graded.outcomes), len(graded.scored)
    if (decisive := needs.policy.decisive(graded.outcomes)) is not None:
        rule = f"sluice.reward.outcomes.{decisive.kind} costs the group"
        return f"{decisive.kind}: {rule}: {decisive.detail}"
    if num_scored < fewest_samples(
        num_samples, whole_groups=needs.whole_groups, least_share=needs.least_share
    ):
        first = next(o for o in graded.outcomes if isinstance(o, Failed))
        return (
            f"{num_samples - num_scored} of {num_samples} samples failed"
            f"{' and the loss compares whole groups' if needs.whole_groups else ''}, the first: "
            f"{first.kind}: {first.detail}"
        )
    if not graded.group.num_response_tokens:
        return "all responses are empty"
    unscored = [o for o in graded.greedy.outcomes if isinstance(o, Failed)] if graded.greedy else []
    if unscored:
        first = unscored[0]
        return f"{first.kind}: no score of the greedy response, the baseline: {first.detail}"
    return ""
