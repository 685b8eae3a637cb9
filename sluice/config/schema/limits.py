"""`sluice.limits.*`: what one client may ask of the services; calls beyond it are refused.

The limits of images hold for rows of data sets as well. Further limits stand with what they bound:
`sluice.max_message_mb`, `data.max_prompt_length`, `sluice.rollout.max_n`,
`sluice.rollout.max_queued`, `sluice.reward.max_client_pending`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sluice.config.schema.section import PositiveInt, Section
from sluice.vision.image_limits import DEFAULT_LIMITS, MOST_PIXELS


class LimitsConfig(Section, frozen=True):
    """Limits of clients."""

    max_submit_streams: Annotated[
        PositiveInt, Meta(description="SubmitPrompts calls that may be open at once.")
    ] = 256
    max_prompts_per_stream: Annotated[
        PositiveInt, Meta(description="Unfinished prompts of one SubmitPrompts call.")
    ] = 16384
    max_client_prompts: Annotated[
        PositiveInt,
        Meta(description="Unfinished prompts of one client, in all its open SubmitPrompts calls."),
    ] = 32768
    max_client_samples: Annotated[
        PositiveInt,
        Meta(description="Samples that one client may have under way at one replica."),
    ] = 1024
    max_client_priority: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description=(
                "Highest priority that a client may ask for its samples; training's have 0."
            ),
        ),
    ] = 0
    max_client_score_items: Annotated[
        PositiveInt,
        Meta(
            description=(
                "Responses that one client may have under way in all its Score calls; each call "
                "has at most 4096."
            )
        ),
    ] = 16384
    max_watchers: Annotated[
        PositiveInt, Meta(description="WatchSteps calls that may be open at once.")
    ] = 256
    max_prompt_turns: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Turns of a prompt that a client submits; replicas take no more than 1024.",
        ),
    ] = 1024
    max_extra_info_kb: Annotated[
        PositiveInt,
        Meta(
            description="Size of the extra_info of a prompt or response that a client sends, KiB."
        ),
    ] = 1024
    max_prompt_images: Annotated[
        int, Meta(ge=1, le=256, description="Images of a prompt of a client or of a data set.")
    ] = DEFAULT_LIMITS.max_images
    max_image_mb: Annotated[PositiveInt, Meta(description="Size of an encoded image, MiB.")] = (
        DEFAULT_LIMITS.max_bytes >> 20
    )
    max_prompt_images_mb: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Size of all encoded images of a prompt, MiB; none: 16, or a quarter of the "
                "largest message if that is less."
            )
        ),
    ] = None
    max_image_pixels: Annotated[
        int,
        Meta(
            ge=1,
            le=MOST_PIXELS,
            description="Width times height of an image; it is read before anything is decoded.",
        ),
    ] = DEFAULT_LIMITS.max_pixels
    max_client_images_mb: Annotated[
        PositiveInt,
        Meta(
            description=(
                "Images of all unfinished prompts that clients submitted, and images that one "
                "client may have under way at one replica, MiB."
            )
        ),
    ] = 512
