"""`sluice.sources.<name>`: one of several sources of prompts in a run."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.schema.actor import AggregationMode, PolicyLossName
from sluice.config.schema.algorithm import EstimatorName
from sluice.config.schema.data import FileList
from sluice.config.schema.section import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
)


class SourceConfig(Section, frozen=True):
    """Files with a share of every batch. What is null is as in the run."""

    files: FileList
    """Training files, as data.train_files; a source that ends begins again."""

    share: PositiveShare
    """Share of the groups of every train batch; the shares of all sources add up to 1."""

    curriculum: Literal["fixed", "yield"] = "fixed"
    """fixed: the share stays; yield: the sources with this word divide the sum of their shares in
    proportion to share times yield, so that groups go where the filter keeps most.
    """

    environment: str | None = None
    """What plays rows without agent_name: a class of sluice.environment.path, tool_agent, or
    single_turn_agent for none; null: as in the run.
    """

    n: PositiveInt | None = None
    """Responses to each prompt, as actor_rollout_ref.rollout.n."""

    adv_estimator: EstimatorName | None = None
    """Estimator, as algorithm.adv_estimator; it sees the source's rows alone."""

    loss_mode: PolicyLossName | None = None
    """Loss, as actor_rollout_ref.actor.policy_loss.loss_mode."""

    loss_agg_mode: AggregationMode | None = None
    """As actor_rollout_ref.actor.loss_agg_mode; denominators count all sources."""

    clip_ratio_low: PositiveFloat | None = None
    """As actor_rollout_ref.actor.clip_ratio_low."""

    clip_ratio_high: PositiveFloat | None = None
    """As actor_rollout_ref.actor.clip_ratio_high."""

    clip_ratio_c: Annotated[float, Meta(gt=1)] | None = None
    """As actor_rollout_ref.actor.clip_ratio_c."""

    use_kl_loss: bool | None = None
    """As actor_rollout_ref.actor.use_kl_loss."""

    kl_loss_coef: NonNegativeFloat | None = None
    """As actor_rollout_ref.actor.kl_loss_coef."""
