"""`algorithm.kl_ctrl`: how the weight of a KL penalty in the reward moves."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section


class KlControlConfig(Section, frozen=True):
    """Controller of the weight (Ziegler et al. 2019, section 2.2)."""

    type: Annotated[
        Literal["fixed", "adaptive"],
        Meta(description="fixed: constant; adaptive: steered towards target_kl."),
    ] = "fixed"
    kl_coef: Annotated[NonNegativeFloat, Meta(description="The weight, or its first value.")] = (
        0.001
    )
    horizon: Annotated[
        PositiveInt, Meta(description="adaptive: rows over which the weight reacts.")
    ] = 10000
    target_kl: Annotated[PositiveFloat, Meta(description="adaptive: divergence to hold.")] = 0.1
