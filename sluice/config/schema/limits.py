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

    max_submit_streams: PositiveInt = 256
    """SubmitPrompts calls that may be open at once."""

    max_prompts_per_stream: PositiveInt = 16384
    """Unfinished prompts of one SubmitPrompts call."""

    max_client_prompts: PositiveInt = 32768
    """Unfinished prompts of one client, in all its open SubmitPrompts calls."""

    max_client_samples: PositiveInt = 1024
    """Samples that one client may have under way at one replica."""

    max_client_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    """Highest priority that a client may ask for its samples; training's have 0."""

    max_client_score_items: PositiveInt = 16384
    """Responses that one client may have under way in all its Score calls; each call has at most
    4096.
    """

    max_watchers: PositiveInt = 256
    """WatchSteps calls that may be open at once."""

    max_prompt_turns: Annotated[int, Meta(ge=1, le=1024)] = 1024
    """Turns of a prompt that a client submits; replicas take no more than 1024."""

    max_extra_info_kb: PositiveInt = 1024
    """Size of the extra_info of a prompt or response that a client sends, KiB."""

    max_prompt_images: Annotated[int, Meta(ge=1, le=256)] = DEFAULT_LIMITS.max_images
    """Images of a prompt of a client or of a data set."""

    max_image_mb: PositiveInt = DEFAULT_LIMITS.max_bytes >> 20
    """Size of an encoded image, MiB."""

    max_prompt_images_mb: PositiveInt | None = None
    """Size of all encoded images of a prompt, MiB; none: 16, or a quarter of the largest message if
    that is less.
    """

    max_image_pixels: Annotated[int, Meta(ge=1, le=MOST_PIXELS)] = DEFAULT_LIMITS.max_pixels
    """Width times height of an image; it is read before anything is decoded."""

    max_client_images_mb: PositiveInt = 512
    """Images of all unfinished prompts that clients submitted, and images that one client may have
    under way at one replica, MiB.
    """
