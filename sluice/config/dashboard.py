"""`sluice.dashboard.*`: the live page, and what it keeps of the groups that ended."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sluice.config.section import NonNegativeInt, PositiveInt, Section

PagePort = Annotated[int, Meta(ge=0, le=65535)]


class DashboardConfig(Section, frozen=True):
    """The live page beside the trainer, and the samples that it shows."""

    port: Annotated[
        PagePort | None,
        Meta(
            description=(
                "Port of the live page, which a process beside trainer rank 0 serves; 0: the "
                "system chooses, see dashboard.url in the run's folder; none: not served."
            )
        ),
    ] = None
    host: Annotated[
        str, Meta(description="Interface of the live page; others than loopback need a token_file.")
    ] = "127.0.0.1"
    samples_mb: Annotated[
        NonNegativeInt,
        Meta(
            description=(
                "Most of the groups that ended, with all their responses, in the folder samples of "
                "the run, MiB; the oldest are deleted; 0: none are written."
            )
        ),
    ] = 256
    sample_chars: Annotated[
        PositiveInt,
        Meta(
            description=(
                "Characters of a prompt or response that are kept there; of a longer one its "
                "beginning and its end."
            )
        ),
    ] = 16384
