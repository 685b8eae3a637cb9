"""Whether the prompts of a run may hold images, and how many and how large."""

from __future__ import annotations

from sluice.config.derived import image_limits, uses_critic
from sluice.config.run import RunConfig
from sluice.vision.image_limits import ImageLimits
from sluice.vision.model_kind import reads_images

_TEXT_ENGINES = frozenset({"sglang"})


def prompt_images(config: RunConfig) -> ImageLimits | None:
    """Limits of prompts' images; ``None``: a part of the run reads text alone.

    That may be the model, the engine or a critic. Where this machine has no `config.json` of the
    model, replicas refuse what they cannot read.
    """
    if uses_critic(config) or config.actor_rollout_ref.rollout.name in _TEXT_ENGINES:
        return None
    if reads_images(config.actor_rollout_ref.model.path) is False:
        return None
    return image_limits(config)
