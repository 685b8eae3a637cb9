"""`algorithm.*`: advantages, group filter, correction for off-policy samples."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.section import PositiveFloat, Section


class FilterGroupsConfig(Section, frozen=True):
    """Dynamic sampling: only groups whose metric differs within the group are trained on."""

    enable: Annotated[
        bool, Meta(description="Filter groups that carry no gradient and generate others instead.")
    ] = False
    metric: Annotated[
        str,
        Meta(
            description="acc, score, seq_reward, seq_final_reward, or any key the scorer returns."
        ),
    ] = "acc"
    min_yield: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "Give up when fewer than this share of min_yield_groups groups was kept; 0: never."
            ),
        ),
    ] = 0.005
    min_yield_groups: Annotated[int, Meta(ge=1, description="Groups the share is taken over.")] = (
        2000
    )


class RolloutCorrectionConfig(Section, frozen=True):
    """Importance weights for samples that an older policy drew."""

    rollout_is: Annotated[
        Literal["token", "sequence"] | None,
        Meta(
            description=(
                "Level of the truncated importance weights exp(old - behaviour); none: no weights."
            )
        ),
    ] = None
    rollout_is_threshold: Annotated[
        PositiveFloat, Meta(description="Upper truncation of the weights.")
    ] = 2.0


class AlgorithmConfig(Section, frozen=True):
    """How rewards become gradients."""

    adv_estimator: Annotated[str, Meta(description="Advantage estimator; known: grpo.")] = "grpo"
    norm_adv_by_std_in_grpo: Annotated[
        bool, Meta(description="Divide by the group's standard deviation; False is Dr. GRPO.")
    ] = True
    filter_groups: FilterGroupsConfig = msgspec.field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = msgspec.field(
        default_factory=RolloutCorrectionConfig
    )
