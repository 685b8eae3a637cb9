"""`sluice.reward.outcomes.*`: what happens to samples that end without a score."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.schema.section import PositiveInt, Section

ThenKey = Literal["leave_out", "drop_group"]
ScoringActionKey = Literal["score_again", "generate_again", "leave_out", "drop_group"]
"""The values of `sluice.algorithm.groups.filter.OutcomeAction`."""

Then = Annotated[
    ThenKey,
    Meta(
        description=(
            "After the last attempt. leave_out: the group's other samples are trained, if enough "
            "are left; drop_group: the group is dropped as failed."
        )
    ),
]


class ScoringFailureConfig(Section, frozen=True):
    """A response that got no score."""

    action: Annotated[
        ScoringActionKey,
        Meta(
            description=(
                "score_again: the same response is graded again; generate_again: another response "
                "is sampled; leave_out: the others are trained; drop_group: the group is dropped."
            )
        ),
    ] = "leave_out"
    max_attempts: Annotated[
        PositiveInt,
        Meta(le=16, description="Times a sample is scored, or generated, in all; then see `then`."),
    ] = 2
    then: Then = "leave_out"


class EngineFailureConfig(Section, frozen=True):
    """Samples that no replica has generated in sluice.reward.max_attempts attempts."""

    then: Then = "leave_out"


class AbortedSampleConfig(Section, frozen=True):
    """Samples that a group's deadline or token budget aborted."""

    then: Then = "leave_out"


def _score_again() -> ScoringFailureConfig:
    return ScoringFailureConfig(action="score_again")


class SampleOutcomesConfig(Section, frozen=True):
    """Samples without a score. None of them ever becomes a number."""

    unscorable: ScoringFailureConfig = msgspec.field(default_factory=ScoringFailureConfig)
    scorer_timeout: ScoringFailureConfig = msgspec.field(default_factory=_score_again)
    scorer_crash: ScoringFailureConfig = msgspec.field(default_factory=_score_again)
    engine_error: EngineFailureConfig = msgspec.field(default_factory=EngineFailureConfig)
    aborted: AbortedSampleConfig = msgspec.field(default_factory=AbortedSampleConfig)
    min_share: Annotated[
        float,
        Meta(
            ge=0.5,
            le=1,
            description=(
                "Share of a group's samples that must have a score for the group to be trained; "
                "two at least, and all where the loss compares whole groups."
            ),
        ),
    ] = 0.5
    max_strikes: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "A prompt is quarantined when so many attempts in a row fail by scorer timeouts, "
                "scorer crashes or errors of an engine; none: never."
            )
        ),
    ] = 3
