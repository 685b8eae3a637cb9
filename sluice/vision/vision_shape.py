"""Whether a model reads images, and what the layout of its prompts depends on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.errors import ConfigError

FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Values of ``model_type`` whose images this package understands."""

# Of the published models, where config.json has no value.
_MERGE_SIZE, _IMAGE_TOKEN = 2, 151655


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The layout of images in one model's prompts.

    Attributes:
        model_type: one of `FAMILIES`.
        image_token_id: represents a merged patch of an image in a prompt.
        merge_size: patches that become one token, along each side.
    """

    model_type: str
    image_token_id: int
    merge_size: int


def read_vision_shape(model_path: Path | str) -> VisionShape | None:
    """Return the shape in ``config.json``; ``None`` for a model that is not one of `FAMILIES`.

    Raises:
        ConfigError: the file is missing or no JSON object.
    """
    file = Path(model_path).expanduser() / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
        family = config.get("model_type")
        vision = msgspec.convert(config.get("vision_config") or {}, dict[str, object])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path: {file} cannot be read ({error}); give the directory "
            "of a Hugging Face model"
        ) from error
    if not isinstance(family, str) or family not in FAMILIES:
        return None
    return VisionShape(
        family,
        msgspec.convert(config.get("image_token_id", _IMAGE_TOKEN), int),
        msgspec.convert(vision.get("spatial_merge_size", _MERGE_SIZE), int),
    )


def reads_images(model_path: str | Path) -> bool | None:
    """Return whether the model in a folder is of a family whose images this package understands.

    Returns:
        ``None`` where no `config.json` can be read: another machine may have one.
    """
    try:
        return read_vision_shape(model_path) is not None
    except ConfigError:
        return None
