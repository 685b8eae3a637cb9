"""Which policies a training step compares, as a value that the learner follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sluice.algorithm.rollout_correction.thresholds import (
    RejectionRule,
    WeightBounds,
    rejection_rules,
    weight_bounds,
)
from sluice.errors import ConfigError

WEIGHT_LEVELS = ("token", "sequence")
BYPASS_LOSS_TYPES = ("ppo_clip", "reinforce")
BYPASS_LOSS_MODE = "bypass_mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionSettings:
    """`algorithm.rollout_correction` by verl's names and defaults.

    Raises:
        ConfigError: a name is unknown or a threshold cannot be read.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"

    def __post_init__(self) -> None:
        if self.rollout_is is not None:
            check_level(self.rollout_is)
        if self.loss_type not in BYPASS_LOSS_TYPES:
            raise ConfigError(
                f"algorithm.rollout_correction.loss_type: unknown value '{self.loss_type}'; known: "
                f"{', '.join(BYPASS_LOSS_TYPES)}"
            )
        self.bounds()
        self.rules()

    def bounds(self) -> WeightBounds:
        """Bounds of the importance weights."""
        return weight_bounds(self.rollout_is_threshold)

    def rules(self) -> tuple[RejectionRule, ...]:
        """Rejection rules, none without `rollout_rs`."""
        if self.rollout_rs is None:
            return ()
        return rejection_rules(self.rollout_rs, self.rollout_rs_threshold)


class OldLogprobs(StrEnum):
    """Where the logprobs of the old policy, the ratio's denominator, come from."""

    RECOMPUTED = "recomputed"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionPlan:
    """What the learner does in one train batch.

    Args:
        old_logprobs: RECOMPUTED: a forward pass of the trainer before the first step (three
            policies); ROLLOUT: the engine's own (two policies, a pass less).
        corrects_old_policy: weights and rejection are worked out once a batch, from the old and
            the engine's logprobs; so are the off-policy metrics.
        corrects_in_loss: they are worked out in the loss instead, at every pass, from the current
            and the engine's logprobs.
        weighs_loss: the loss of a token is multiplied by its importance weight.
        loss_mode: policy loss to use.
    """

    old_logprobs: OldLogprobs
    corrects_old_policy: bool
    corrects_in_loss: bool
    weighs_loss: bool
    loss_mode: str


def correction_plan(settings: RolloutCorrectionSettings, *, loss_mode: str) -> CorrectionPlan:
    """The plan for a configuration.

    In bypass mode, also where only the loss is named, the loss is verl's ``bypass_mode``: with
    ``ppo_clip`` the ratio to the engine's policy corrects by itself and is not weighted again,
    ``reinforce`` has no ratio and takes the weights. Rejection applies in both.

    Args:
        settings: of `algorithm.rollout_correction`.
        loss_mode: `actor.policy_loss.loss_mode`, used unless bypassed.
    """
    weighs = settings.rollout_is is not None
    if settings.bypass_mode or loss_mode == BYPASS_LOSS_MODE:
        return CorrectionPlan(
            old_logprobs=OldLogprobs.ROLLOUT,
            corrects_old_policy=False,
            corrects_in_loss=True,
            weighs_loss=weighs and settings.loss_type == "reinforce",
            loss_mode=BYPASS_LOSS_MODE,
        )
    return CorrectionPlan(
        old_logprobs=OldLogprobs.RECOMPUTED,
        corrects_old_policy=True,
        corrects_in_loss=False,
        weighs_loss=weighs,
        loss_mode=loss_mode,
    )


def check_level(level: str) -> None:
    """Check the value of `rollout_is`.

    Raises:
        ConfigError: it is none of `WEIGHT_LEVELS`.
    """
    if level not in WEIGHT_LEVELS:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is: unknown value '{level}'; known: "
            f"{', '.join(WEIGHT_LEVELS)}, or null for no weights"
        )
