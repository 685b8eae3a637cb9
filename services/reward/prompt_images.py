"""Whether the prompts of a run may hold images, and how many and how large."""

from __future__ import annotations

from sluice.config.derived import image_limits
from sluice.config.run import RunConfig
from sluice.vision.image_limits import ImageLimits
from sluice.vision.model_kind import reads_images


def prompt_images(config: RunConfig) -> ImageLimits | None:
    """Limits of prompts' images; ``None``: the model reads text alone.

    Where this machine has no `config.json` of the model, replicas refuse what they cannot read.
    """
    if reads_images(config.actor_rollout_ref.model.path) is False:
        return None
    return image_limits(config)
