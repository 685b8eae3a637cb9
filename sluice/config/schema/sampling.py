"""`sluice.sampling.*`: how many prompts and samples fill a batch of mixed groups."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.schema.section import PositiveInt, Section

StrategyKey = Literal["rounds", "stream", "staged", "memory", "staged_memory"]
"""The names of `sluice.algorithm.sampling.rules.StrategyName`."""


class SamplingConfig(Section, frozen=True):
    """Over-generation."""

    strategy: Annotated[
        StrategyKey,
        Meta(
            description=(
                "rounds: verl's waves of prompts, surplus thrown away; stream: continuous refill, "
                "surplus carried over; staged: a few samples of a group decide about the rest; "
                "memory: earlier attempts of a prompt decide whether it starts; staged_memory: "
                "both."
            )
        ),
    ] = "stream"
    probe_samples: Annotated[
        PositiveInt,
        Meta(description="staged: samples of a group that are generated first; below rollout.n."),
    ] = 4
    exploration: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description=(
                "Least probability with which a prompt or group that is not worth its tokens is "
                "generated all the same."
            ),
        ),
    ] = 0.1
    coverage_guard: Annotated[
        bool,
        Meta(
            description=(
                "staged, memory: keep the share of hard prompts among trained groups what it is "
                "without them."
            )
        ),
    ] = True
    on_policy_fill: Annotated[
        Literal["exact", "expected"] | None,
        Meta(
            description=(
                "Where max_staleness is 0, except for rounds: expected: as many groups run as are "
                "expected to fill a batch; when it is full, the next policy samples the others "
                "again; exact: never a group that might be one too many, so that a run can "
                "repeat; none: exact with an engine whose samples repeat "
                "(sluice.rollout.batch_invariant), else expected."
            )
        ),
    ] = None
