"""`*.optim`: AdamW and its learning-rate schedule, of the policy and of the critic."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.section import NonNegativeFloat, PositiveFloat, Section, Share


class OptimConfig(Section, frozen=True):
    """AdamW and its learning-rate schedule; schedule steps are train batches."""

    lr: Annotated[PositiveFloat, Meta(description="Peak learning rate.")] = 1e-6
    lr_warmup_steps: Annotated[
        int,
        Meta(
            description=(
                "Linear warm-up in train batches; <= 0: lr_warmup_steps_ratio times the total."
            )
        ),
    ] = -1
    lr_warmup_steps_ratio: Annotated[
        Share, Meta(description="Warm-up as a share of the total.")
    ] = 0.0
    lr_scheduler_type: Annotated[
        Literal["constant", "cosine", "linear", "inverse_square_root"],
        Meta(description="Shape after the warm-up."),
    ] = "constant"
    min_lr_ratio: Annotated[
        Share, Meta(description="Least multiplier after the warm-up, of all but constant.")
    ] = 0.0
    num_cycles: Annotated[
        PositiveFloat, Meta(description="Waves of cosine; 0.5 is a single descent.")
    ] = 0.5
    total_training_steps: Annotated[
        int, Meta(description="Length of the schedule in train batches; -1: the run's.")
    ] = -1
    weight_decay: Annotated[NonNegativeFloat, Meta(description="Decoupled weight decay.")] = 0.01
    betas: Annotated[tuple[float, float], Meta(description="AdamW's betas.")] = (0.9, 0.999)
    eps: Annotated[PositiveFloat, Meta(description="AdamW's epsilon.")] = 1e-8
    clip_grad: Annotated[
        PositiveFloat,
        Meta(description="Global gradient norm above which gradients are scaled down."),
    ] = 1.0


class CriticOptimConfig(OptimConfig, frozen=True):
    """The critic's, which learns ten times faster by default (verl)."""

    lr: Annotated[PositiveFloat, Meta(description="Peak learning rate.")] = 1e-5
