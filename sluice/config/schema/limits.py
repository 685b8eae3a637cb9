"""`sluice.limits.*`: what one client may send; the services refuse calls beyond it.

The limits of images apply to rows of data sets too. Other limits are beside what they bound:
`sluice.max_message_mb`, `data.max_prompt_length`, `sluice.rollout.max_n`,
`sluice.rollout.max_queued`, `sluice.reward.max_client_pending`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sluice.config.schema.section import PositiveInt, Section
from sluice.vision.image_limits import DEFAULT_LIMITS, MOST_PIXELS


class LimitsConfig(Section, frozen=True):
    """Limits of what one client may send or have unfinished."""

    max_submit_streams: PositiveInt = 256
    """SubmitPrompts calls that may be open at the same time."""

    max_prompts_per_stream: PositiveInt = 16384
    """Unfinished prompts of one SubmitPrompts call."""

    max_client_prompts: PositiveInt = 32768
    """Unfinished prompts of one client over all its open SubmitPrompts calls."""

    max_client_samples: PositiveInt = 1024
    """Unfinished samples of one client at one replica."""

    max_client_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    """Highest priority that a client may request for its samples; training has priority 0."""

    max_client_score_items: PositiveInt = 16384
    """Unscored responses of one client over all its Score calls; one call has at most 4096."""

    max_watchers: PositiveInt = 256
    """WatchSteps calls that may be open at the same time."""

    max_prompt_turns: Annotated[int, Meta(ge=1, le=1024)] = 1024
    """Turns of a prompt that a client submits; replicas accept at most 1024."""

    max_extra_info_kb: PositiveInt = 1024
    """Size of the extra_info that a client sends with a prompt or response, KiB."""

    max_prompt_images: Annotated[int, Meta(ge=1, le=256)] = DEFAULT_LIMITS.max_images
    """Images of one prompt, from a client or a data set."""

    max_image_mb: PositiveInt = DEFAULT_LIMITS.max_bytes >> 20
    """Size of one encoded image, MiB."""

    max_prompt_images_mb: PositiveInt | None = None
    """All encoded images of one prompt, MiB; none: 16, or a quarter of a message if less."""

    max_image_pixels: Annotated[int, Meta(ge=1, le=MOST_PIXELS)] = DEFAULT_LIMITS.max_pixels
    """Width times height of an image, read from its header before it is decoded."""

    max_client_images_mb: PositiveInt = 512
    """Size of the images of all unfinished prompts that clients submitted, and of the images of one
    client's unfinished samples at one replica, MiB.
    """
