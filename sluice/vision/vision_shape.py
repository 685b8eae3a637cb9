"""Whether a model reads images, and what the layout of a prompt must know of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.errors import ConfigError

FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Values of ``model_type`` whose images this package understands."""

_MERGE = {"qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2, "qwen3_vl_moe": 2}
_IMAGE_TOKEN = 151655  # of the published models, where config.json does not say


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Of one model.

    Attributes:
        model_type: one of `FAMILIES`.
        image_token_id: stands in a prompt for each merged patch of an image.
        merge_size: patches that become one token, along each side.
    """

    model_type: str
    image_token_id: int
    merge_size: int


def read_vision_shape(model_path: Path | str) -> VisionShape | None:
    """From ``config.json``; ``None`` for a model that is not one of `FAMILIES`.

    Raises:
        ConfigError: the file is missing or no JSON object.
    """
    file = Path(model_path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        family = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path: {file} cannot be read ({error}); give the directory "
            "of a Hugging Face model"
        ) from error
    if family not in FAMILIES:
        return None
    vision = config.get("vision_config") or {}
    return VisionShape(
        family,
        int(config.get("image_token_id", _IMAGE_TOKEN)),
        int(vision.get("spatial_merge_size", _MERGE[family])),
    )


def reads_images(model_path: str | Path) -> bool | None:
    """Whether the model in a folder is of a family whose images this package understands.

    Args:
        model_path: a folder in the form of Hugging Face's.

    Returns:
        ``None`` where no `config.json` can be read: this machine cannot tell, another one may.
    """
    try:
        data = (Path(model_path).expanduser() / "config.json").read_bytes()
        found = msgspec.json.decode(data, type=dict[str, object])
    except (OSError, ValueError, RecursionError):
        return None
    family = found.get("model_type")
    return isinstance(family, str) and family in FAMILIES
