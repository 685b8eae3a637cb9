"""`sluice.guards`: which checkpoints stay, and rules that hold, stop or roll back a run."""

from __future__ import annotations

from typing import Literal

import msgspec

from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveShare,
    Section,
)


class KeepConfig(Section, frozen=True):
    """The best checkpoints, which no retention deletes."""

    metric: str | None = None
    """Metric of validations by which checkpoints are compared; none: held-out accuracy."""

    better: Literal["max", "min"] = "max"
    """Whether larger or smaller values are better."""

    top: NonNegativeInt = 1
    """Best checkpoints that stay beside the newest ones; 0: none."""


class GuardRuleConfig(Section, frozen=True):
    """One element of sluice.guards.rules."""

    action: Literal["hold", "stop", "rollback"]
    metric: str | None = None
    better: Literal["max", "min"] = "max"
    target: float | None = None
    limit: float | None = None
    deviations: NonNegativeFloat | None = None
    times: PositiveInt = 1
    window: PositiveInt = 1
    learning_rate_factor: PositiveShare = 0.5
    most_rollbacks: PositiveInt = 2


class GuardsConfig(Section, frozen=True):
    """What a run does about its own metrics."""

    keep: KeepConfig = KeepConfig()
    rules: list[GuardRuleConfig] = msgspec.field(default_factory=list)
    """Rules that hold, stop or roll back the run when a metric reaches a target, passes a limit, or
    falls behind its best value; the first that is broken acts. docs/guards.md has their keys.
    """
