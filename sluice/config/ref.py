"""`actor_rollout_ref.ref`: the frozen model that divergences are measured from."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sluice.config.section import PositiveInt, Section


class RefConfig(Section, frozen=True):
    """Forward passes of the reference model; it exists while a KL term is on."""

    log_prob_micro_batch_size_per_gpu: Annotated[
        PositiveInt | None,
        Meta(description="Rows per forward pass; none: the actor's micro-batch."),
    ] = None
    log_prob_use_dynamic_bsz: Annotated[
        bool | None, Meta(description="Cut by tokens instead of rows; none: as the actor.")
    ] = None
    log_prob_max_token_len_per_gpu: Annotated[
        PositiveInt | None, Meta(description="Token budget then; none: the actor's.")
    ] = None
